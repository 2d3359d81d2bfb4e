"""A disk that is full or read-only, at every place where a run writes: one sentence, nothing half-written, and a later
--resume gives the metrics of a run that had no trouble."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors import SafetensorError

from bad_disk import BadDisk
from tiny import tiny_checkpoint, tiny_config
from tracefp4 import files, saves
from tracefp4.cli import main
from tracefp4.compare import compare
from tracefp4.files import StorageError, append_text, folder_lock, recover_dir, replaced_dir, write_text_atomic
from tracefp4.saves import SaveSizes

RECIPE = """
[model]
path = "{path}"
[method]
name = "bf16"
[sampling]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 6
[rollout]
max_num_seqs = 8
max_model_len = 64
[run]
steps = 3
eval_prompts = 2
eval_every = 1
keep_best = 1
save_every = 1
state_every = 1
keep_states = 1
threads = 1
tensorboard = false
"""
PROBLEMS = pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "read-only"])


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BadDisk:
    return BadDisk(monkeypatch)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "r.toml"
    path.write_text(RECIPE.format(path=tiny_checkpoint(folder / "model", tiny_config())))
    return path


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    assert train(recipe, out) == 0
    return out


def train(recipe: Path | str, out: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), "--out", str(out), *more])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def assert_untroubled(out: Path, whole: Path) -> None:
    for name in ("metrics.jsonl", "final.json", "checkpoint/model.safetensors", "checkpoint-best/best.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert hidden(out) == []


def hidden(folder: Path) -> list[Path]:
    """What a write that did not end well could leave."""
    return [p for p in folder.rglob("*") if p.name.startswith(".") or p.name == files.LOCK]


@PROBLEMS
def test_a_run_folder_that_cannot_be_made(
    number: int, recipe: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fail("/out", number)
    assert train(recipe, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error == f"error: the folder {tmp_path / 'out'} cannot be written ({os.strerror(number)})\n"
    assert not (tmp_path / "out").exists()


@PROBLEMS
@pytest.mark.parametrize("name", ["config.json", "run.json", "run.lock"])
def test_facts_that_cannot_be_written_stop_the_run(
    name: str, number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    disk.fail(rf"out/\.?{name}", number)
    assert train(recipe, out) == 2
    assert capsys.readouterr().err == f"error: {out / name} cannot be written ({os.strerror(number)})\n"
    assert list(out.iterdir()) == []
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


@PROBLEMS
@pytest.mark.parametrize("name", ["metrics.jsonl", "timing.jsonl"])
def test_figures_that_cannot_be_written_stop_the_run(
    name: str, number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    disk.fail(name, number, skip=2)  # the file is made and the first step goes through
    assert train(recipe, out) == 2
    assert f"error: {out / name} cannot be written ({os.strerror(number)})\n" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes().endswith(b"}\n")
    assert not (out / "final.json").exists()
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


@PROBLEMS
@pytest.mark.parametrize("where", ["states/", "states/.*safetensors", "states/.*json"])
def test_a_state_that_cannot_be_written_is_a_warning(
    where: str,
    number: int,
    recipe: Path,
    whole: Path,
    tmp_path: Path,
    disk: BadDisk,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    disk.fail(where, number)
    assert train(recipe, out, f"watch.command=cat >> {tmp_path}/told") == 0
    error = capsys.readouterr().err
    assert error.count("warning: a state was not saved, the run goes on and tries again") == 1
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    saves = [message for message in told if "event" not in message]  # the watchdogs speak too
    assert sorted(message["kind"] for message in saves) == ["done", "warning", "warning"]
    assert sum(message["message"].startswith("a state was not saved") for message in saves) == 1
    assert sum(message["message"].startswith("3 saves of") for message in saves) == 1  # at the end, once more
    assert os.strerror(number) in error
    assert_untroubled(out, whole)
    timing = [json.loads(line)["failed_saves"] for line in (out / "timing.jsonl").read_text().splitlines()]
    assert timing == [0, 1, 2]


@PROBLEMS
def test_a_state_that_fails_leaves_the_one_before(
    number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk
) -> None:
    out = tmp_path / "out"
    disk.fail("metrics.jsonl", number, skip=2)
    assert train(recipe, out) == 2
    state = (out / "states/step-00000001/state.safetensors").read_bytes()
    disk.fail("states/|final.json", number)
    assert train(recipe, out, "--resume") == 2
    assert [p.name for p in (out / "states").iterdir()] == ["step-00000001"]
    assert (out / "states/step-00000001/state.safetensors").read_bytes() == state
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


@PROBLEMS
def test_a_checkpoint_that_cannot_be_written(
    number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the way it is a warning; at the end it is what the run was for."""
    out = tmp_path / "out"
    disk.fail("out/.checkpoint-(?!best)[^/]*$", number, skip=1)
    assert train(recipe, out) == 2
    error = capsys.readouterr().err
    assert error.count("warning: the policy was not saved") == 1
    assert f"error: {out / 'checkpoint'} cannot be written ({os.strerror(number)})\n" in error
    assert (out / "checkpoint/model.safetensors").exists()
    assert hidden(out) == []
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


@PROBLEMS
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_checkpoint_half_written_is_none(
    file: str, number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def safetensors(*_: Any, **__: Any) -> None:
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})")

    def tokenizers(*_: Any, **__: Any) -> None:
        raise Exception(f"{os.strerror(number)} (os error {number})")

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if file == "model.safetensors":
            patch.setattr("transformers.modeling_utils.safe_save_file", safetensors)
        elif file == "tokenizer.json":
            patch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", tokenizers)
        else:
            disk.fail(f"out/.checkpoint-.*/{file}", number)
        assert train(recipe, out) == 2
    assert not (out / "checkpoint").exists()
    assert hidden(out) == []
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert (out / "checkpoint/model.safetensors").read_bytes() == (whole / "checkpoint/model.safetensors").read_bytes()


@PROBLEMS
def test_a_best_policy_that_cannot_be_written_is_a_warning(
    number: int, recipe: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.fail("out/.checkpoint-best", number)
    assert train(recipe, tmp_path / "out") == 0
    assert capsys.readouterr().err.count("warning: the best policy so far was not saved") == 1
    assert not (tmp_path / "out/checkpoint-best").exists()
    assert json.loads((tmp_path / "out/final.json").read_text())["best"] is None


@PROBLEMS
def test_a_summary_that_cannot_be_written(
    number: int, recipe: Path, whole: Path, tmp_path: Path, disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    disk.fail(r"\.final\.json", number)
    assert train(recipe, out) == 2
    assert f"error: {out / 'final.json'} cannot be written ({os.strerror(number)})\n" in capsys.readouterr().err
    disk.mend()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


@PROBLEMS
@pytest.mark.parametrize("later", [False, True])
def test_event_files_that_cannot_be_written_are_a_warning(
    later: bool,
    number: int,
    recipe: Path,
    whole: Path,
    tmp_path: Path,
    disk: BadDisk,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def write(self: RecordWriter, data: bytes, plain: Any = RecordWriter.write) -> None:
        disk.check("an event")
        plain(self, data)

    out = tmp_path / "out"
    monkeypatch.setattr(RecordWriter, "write", write)  # in a thread of tensorboard's own
    disk.fail("an event" if later else "out/tensorboard", number, skip=30 if later else 0)
    assert train(recipe, out, "run.tensorboard=true") == 0
    error = capfd.readouterr().err
    assert error.count("tensorboard cannot be written") == 1
    assert "Traceback" not in error
    assert_untroubled(out, whole)


@PROBLEMS
@pytest.mark.parametrize("name", ["compare.json", "a/log.txt", "summary.json", "table.md"])
def test_files_of_a_comparison(name: str, number: int, tmp_path: Path, disk: BadDisk) -> None:
    script = "import pathlib, sys; run = pathlib.Path(sys.argv[1], 'seed0'); run.mkdir(exist_ok=True); "
    script += """(run / "metrics.jsonl").write_text('{"reward/mean": 1, "step": 0}\\n')"""

    def command(recipe: str, mode: str, seeds: Any, folder: Path, overrides: Any) -> list[str]:
        return [sys.executable, "-S", "-c", script, str(folder)]

    quiet, out = Console(file=io.StringIO()), tmp_path / "out"
    disk.fail(name if "/" in name else rf"out/\.{name}", number)
    with pytest.raises(StorageError, match=re.escape(f"{name} cannot be written ({os.strerror(number)})")):
        compare("r.toml", ["a"], [0], out, command=command, console=quiet)
    assert not (out / name).exists()
    assert hidden(out) == []
    disk.mend()
    compare("r.toml", ["a"], [0], out, resume=True, command=command, console=quiet)
    assert (out / "table.md").exists()


def test_too_little_space_is_said_at_the_start(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saves, "free_bytes", lambda _: 1 << 20)
    assert train(recipe, tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert re.search(
        r"out needs up to \d+ MiB for states and checkpoints and its disk has 1 MiB free: free some", error
    )
    assert not (tmp_path / "out").exists()


def test_sizes_bound_what_a_run_leaves(recipe: Path, whole: Path) -> None:
    weights = sum(p.stat().st_size for p in (recipe.parent / "model").glob("*.safetensors")) // 2
    sizes = SaveSizes.of(weights, 2)
    assert (whole / "states/step-00000003/state.safetensors").stat().st_size <= sizes.state
    assert files.size_of(whole / "checkpoint") <= sizes.policy


# The operations by themselves


@PROBLEMS
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_file_is_old_or_new(call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    write_text_atomic(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(StorageError, match=re.escape(f"f cannot be written ({os.strerror(number)})")):
        write_text_atomic(path, "new")
    if call == "fsync":
        with pytest.raises(StorageError):
            append_text(path, " and more")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("exchange", [True, False], ids=["exchanged", "two renames"])
def test_a_folder_is_old_or_new(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "d"
    for text in ("a", "b"):
        with replaced_dir(target) as staging:
            (staging / "f").write_text(text)
        assert (target / "f").read_text() == text
    with pytest.raises(ZeroDivisionError), replaced_dir(target) as staging:
        (staging / str(1 / 0)).mkdir()
    assert (target / "f").read_text() == "b"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]
    target.rename(tmp_path / ".d-old")  # a kill between the two renames
    (tmp_path / ".d-x").mkdir()
    recover_dir(target)
    assert (target / "f").read_text() == "b"
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_what_a_killed_process_left_is_swept(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    (out / "final.json").unlink()
    for name in (".metrics.jsonl.abc", ".run.json.x_1"):
        (out / name).write_text("{")
    for name in (".checkpoint-q", ".checkpoint-best-q", "states/.step-00000003-q"):
        (out / name).mkdir()
    assert train(recipe, out, "--resume") == 0
    assert_untroubled(out, whole)


def test_a_killed_holder_frees_its_folder(tmp_path: Path) -> None:
    code = "import os, sys, pathlib; from tracefp4.files import folder_lock\n"
    code += "with folder_lock(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == -9
    assert (tmp_path / files.LOCK).exists()
    with folder_lock(tmp_path), pytest.raises(StorageError, match="is in use by process"), folder_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with folder_lock(tmp_path):
        pass
    assert "on a file system without locks" in capsys.readouterr().err


# Real file systems, mounted where only the child sees them

MOUNTS = """
set -e
mkdir -p "$1/small" "$1/fixed"
mount -t tmpfs -o size=2M tmpfs "$1/small"
mount --bind "$1/fixed" "$1/fixed"
mount -o remount,ro,bind "$1/fixed"
exec "$3" "$4" "$1" "$2"
"""
STORY = """
import os, pathlib, sys
sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, {tests!r})
from test_faults import train
from tracefp4 import saves
from tracefp4.loop import run as loop

folder, recipe = pathlib.Path(sys.argv[1]), sys.argv[2]
out, filler = folder / "small/out", folder / "small/filler"
print("read-only:", train(recipe, folder / "fixed/out"), flush=True)
print("too small:", train(recipe, out), os.listdir(folder / "small"), flush=True)

# The estimates out of the way, the writes themselves meet the full disk.
loop.check_space, saves.free_bytes = lambda *_: None, lambda _: 1 << 40

def fill():
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def step(run, index, plain=loop.TrainingRun.step):
    figures = plain(run, index)
    if index == 1:
        fill()
    return figures

plain, loop.TrainingRun.step = loop.TrainingRun.step, step
settings = ("run.keep_best=0", "run.save_every=0")
print("full:", train(recipe, out, *settings), sorted(os.listdir(out)), os.listdir(out / "states"), flush=True)
loop.TrainingRun.step = plain
filler.unlink()
print("resumed:", train(recipe, out, *settings, "--resume"), sorted(os.listdir(out)), flush=True)
(folder / "metrics.jsonl").write_bytes((out / "metrics.jsonl").read_bytes())
"""


def test_on_a_small_and_on_a_read_only_file_system(recipe: Path, whole: Path, tmp_path: Path) -> None:
    probe, unshare = tmp_path / "probe", shutil.which("unshare")
    probe.mkdir()
    if unshare is None or subprocess.run([unshare, "-m", "mount", "-t", "tmpfs", "x", probe]).returncode:
        pytest.skip("this process may not mount file systems: it takes root and `unshare -m`")
    story = tmp_path / "story.py"
    story.write_text(STORY.format(tests=str(Path(__file__).parent)))
    command = [unshare, "-m", "sh", "-c", MOUNTS, "sh", tmp_path, recipe, sys.executable, story]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert "read-only: 2\n" in text, text
    assert f"error: the folder {tmp_path / 'fixed/out'} cannot be written (Read-only file system)\n" in text
    assert "too small: 2 []\n" in text, text
    files = ["config.json", "events.jsonl", "metrics.jsonl", "run.json", "samples.jsonl", "states", "timing.jsonl"]
    assert f"full: 2 {files} ['step-00000001']\n" in text, text
    assert "(No space left on device)\n" in text
    assert "resumed: 0 ['checkpoint', 'config.json', 'events.jsonl', 'final.json', 'metrics.jsonl'," in text, text
    assert "Traceback" not in text
    assert (tmp_path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
