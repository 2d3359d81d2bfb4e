"""tracefp4 guidance: what it prints, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stored import make_record
from tracefp4.cli import main
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance_cli import parse_size


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Three shards of two samples: versions 0, 1, 2."""
    with ShardStore(str(tmp_path / "g")) as store:
        for version in range(3):
            store.put(f"a{version}", make_record(version, rows=300, version=version, layers=(2, 3, 4)))
            store.put(f"b{version}", make_record(version, rows=5, version=version, recipe_hash="other"))
            assert store.flush(10)
    return str(tmp_path / "g")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["guidance", *arguments])
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def flip(url: str, shard: int, byte: int) -> str:
    path = sorted(Path(url).glob("*.safetensors"))[shard]
    data = bytearray(path.read_bytes())
    data[byte] ^= 4
    path.write_bytes(data)
    return path.name


def test_inspect_lists_the_samples(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", url)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{url}: 3 shards, 6 samples"
    assert lines[1].split() == ["sample", "rows", "layers", "bits", "sites", "recipe", "versions", "age"]
    assert lines[2].split()[:7] == ["a0", "300", "2-4", "1.125", "expert_input,key,value", "abc", "0"]
    assert lines[5].split()[:7] == ["b1", "5", "1,3", "1.125", "expert_input,key,value", "other", "1"]
    found = json.loads(run(capsys, "inspect", url, "--json")[1])
    assert [s["sample"] for s in found["samples"]] == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert found["samples"][5]["versions"] == [2, 2]
    assert 0 <= found["samples"][0]["age_seconds"] < 60


def test_verify_names_what_is_damaged_and_exits_1(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "verify", url)
    assert (code, out.count("\n")) == (0, 1)
    assert "6 samples in 3 shards are whole" in out
    payload, header = flip(url, 0, -1), flip(url, 2, 50)
    code, out, _ = run(capsys, "verify", url)
    assert code == 1
    assert f"checksum: the header of shard {header} is damaged" in out
    assert f"checksum: sample b0, value of layer 3, chunk 0 of shard {payload} is damaged" in out
    assert "3 samples in 2 shards are whole" in out
    assert out.splitlines()[-1].endswith("2 damaged")
    code, out, _ = run(capsys, "verify", url, "--json")
    assert code == 1
    damaged = json.loads(out)["damaged"]
    assert [(d["shard"], d["sample"]) for d in damaged] == [(header, None), (payload, "b0")]


def test_stats_add_up(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "stats", url)
    assert code == 0
    assert "expert_input: 1.125 bits a value, 10 bytes a row and layer" in out
    assert "policy versions 0 to 2" in out
    found = json.loads(run(capsys, "stats", url, "--json")[1])
    assert found["bytes"] == sum(p.stat().st_size for p in Path(url).iterdir())
    assert found["payload_bytes"] == 3 * (300 * 3 + 5 * 2) * 22
    assert found["overhead_percent"] == pytest.approx(100 * (found["bytes"] / found["payload_bytes"] - 1))
    assert found["sites"]["key"] == {
        "payload_bytes": 3 * (300 * 3 + 5 * 2) * 6,
        "bytes_per_row_and_layer": 6,
        "bits_per_value": [1.125],
    }


def test_prune_by_versions_by_bytes_and_temp_files(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "prune", url, "--keep-versions", "2")
    assert (code, out) == (0, f"{url}: removed 1 shards and 0 unfinished files\n")
    (Path(url) / ".tmp.elsewhere.1.x").write_bytes(b"")
    os.utime(Path(url) / ".tmp.elsewhere.1.x", (0, 0))
    oldest = min(p.name for p in Path(url).glob("*.safetensors"))
    found = json.loads(run(capsys, "prune", url, "--temp", "--keep-bytes", "1k", "--json")[1])
    assert found == {"url": url, "removed_shards": [oldest], "removed_temps": [".tmp.elsewhere.1.x"]}
    assert len(list(Path(url).iterdir())) == 1


@pytest.mark.parametrize("scheme", ["", "local://"], ids=["folder", "fsspec"])
def test_a_folder_of_stores_names_them(scheme: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """guidance.url is the folder of the runs' stores: without a word, a prune of it would seem to have worked."""
    parent = scheme + str(Path(url).parent)
    (Path(url).parent / "empty").mkdir()
    told = f"no shard lies here; below are the stores {parent}/g: name one of them\n"
    for command in (["inspect"], ["verify"], ["stats"], ["prune", "--keep-bytes", "0"]):
        assert run(capsys, *command, parent)[1].endswith(told)
        assert "no shard lies here" not in run(capsys, *command, parent, "--json")[1]
    assert len(list(Path(url).iterdir())) == 3
    assert "no shard lies here" not in run(capsys, "inspect", scheme + url)[1]


def test_mistakes_are_one_sentence_and_exit_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    absent = url + "/absent"
    for command in ("inspect", "verify", "stats"):
        assert run(capsys, command, absent)[::2] == (
            2,
            f"error: there is no guidance store at {absent}: No such file or directory\n",
        )
    assert not Path(absent).exists()
    code, _, err = run(capsys, "prune", url)
    assert (code, err) == (2, "error: nothing to prune: give --keep-bytes, --keep-versions or --temp\n")
    code, _, err = run(capsys, "prune", url, "--keep-bytes", "lots")
    assert (code, err) == (2, "error: --keep-bytes must be a number of bytes such as 1500 or 20G, got 'lots'\n")


def test_sizes() -> None:
    assert [parse_size(t) for t in ("0", "1500", "2k", "3M", "20G", "1T")] == [
        0,
        1500,
        2048,
        3 << 20,
        20 << 30,
        1 << 40,
    ]
    for bad in ("", "G", "-1", "1.5G", "²"):
        with pytest.raises(TracefpError):
            parse_size(bad)
