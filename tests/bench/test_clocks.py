"""Samples of nvidia-smi beside a measurement; a program of that name stands in for it."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tracefp4.bench.clocks import Clocks, read, sampled

GPU = torch.device("cuda")


def put_in_the_way(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\n" + program)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))


def test_medians_of_what_was_written_while_it_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "1980, 90.5, 0x0\n" + "1500, 699.0, 0x4\n" * 3
    asked = tmp_path / "asked"
    put_in_the_way(
        f"echo $@ > {asked}\nprintf '{lines[:17]}'\nsleep .3\nprintf '{lines[17:]}15'\nexec sleep 9\n",
        tmp_path,
        monkeypatch,
    )
    with sampled(GPU) as clocks:
        time.sleep(0.8)
    assert clocks == Clocks(1500.0, 699.0, 1.0)  # the first sample told that the program answers, the last is cut off
    assert str(clocks) == "1500, 699, held down"
    assert asked.read_text().startswith("-i GPU-abc --query-gpu=clocks.sm,power.draw,")


@pytest.mark.parametrize("program", ["exit 1\n", "echo nothing to say\nexec sleep 9\n"])
def test_without_an_answer_nothing_is_known(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_the_way(program, tmp_path, monkeypatch)
    with sampled(GPU) as clocks:
        pass
    assert clocks == Clocks()
    assert str(clocks) == ""


def test_without_the_program_and_on_a_cpu_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sampled(torch.device("cpu")) as clocks:
        pass
    assert clocks == Clocks()
    put_in_the_way("", tmp_path, monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with sampled(GPU) as clocks:
        pass
    assert clocks == Clocks()


def test_the_program_ends_where_what_is_measured_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = tmp_path / "ended"
    put_in_the_way(
        f"trap 'touch {ended}; exit' TERM\necho 1, 2, 0x0\nwhile :; do sleep .05; done\n", tmp_path, monkeypatch
    )
    with pytest.raises(RuntimeError, match="out of memory"), sampled(GPU):
        raise RuntimeError("out of memory")
    assert ended.exists()


def test_a_card_that_does_not_tell_its_power() -> None:
    found = Clocks()
    read("1980, [N/A], 0x0\n1710, [N/A], 0x0\n", found)
    assert found == Clocks()
    read("1980, 300, 0x1\n1710, 310, 0x1\n", found)
    assert (found.sm_mhz, found.watts, found.limited) == (1845.0, 305.0, 0.0)
    assert str(found) == "1845, 305"
