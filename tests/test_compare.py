"""Comparing methods with a made-up training command: what is written, and that no child is left behind."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from processes import alive, read_pid, wait_for
from tracefp4.compare import Command, CompareError, compare, train_command
from tracefp4.config import ConfigError
from tracefp4.files import StorageError, folder_lock
from tracefp4.report import RunFolderError

WRITE_RUN = """
import json, os, pathlib, sys
mode, folder, seeds = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3].split(",")
print("training", mode, "with", os.environ["OMP_NUM_THREADS"], "threads")
for seed in seeds:
    run = folder / f"seed{seed}"
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.json").write_text('{"run": {"steps": 2}}')
    for step in range(2):
        line = {"step": step, "reward/mean": 0.5, "mismatch/logprob_abs_diff_max": 4.0,
                "mismatch/logprob_abs_diff_mean": (1 + int(seed)) * (1.0 if mode == "bf16" else 2.0)}
        with open(run / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\\n")
    (run / "final.json").write_text("{}")
"""
FAIL = "print('loading'); print('out of luck'); raise SystemExit(3)"
SLEEP = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[2], "pid").write_text(str(os.getpid()))
print("asleep", flush=True)
time.sleep(60)
"""
WATCHING = "from tracefp4.signals import end_with_stdin; end_with_stdin()" + SLEEP
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SLEEP


def fake(**scripts: str) -> Command:
    """A command that runs the script of the mode, WRITE_RUN unless given."""

    def command(recipe: str, mode: str, seeds: Sequence[int], folder: Path, overrides: Sequence[str]) -> list[str]:
        names = ",".join(map(str, seeds))
        script = scripts.get(mode, WRITE_RUN)
        return [sys.executable, "-S", "-c", script, mode, str(folder), names, recipe, *overrides]

    return command


def test_the_command_of_a_mode(tmp_path: Path) -> None:
    assert train_command("r.toml", "trace", [0, 2], tmp_path / "trace", ["train.lr=1"])[1:] == [
        *("-m", "tracefp4", "train", "r.toml", "train.lr=1", "method.name=trace"),
        *("--out", str(tmp_path / "trace"), "--seeds", "0,2", "--end-with-stdin"),
    ]


def test_processes_share_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefp4.compare.visible_gpus", lambda: ["3", "5"])
    told = "\nprint('on', os.environ['CUDA_VISIBLE_DEVICES'])"
    modes = ["bf16", "qat", "naive"]
    command = fake(**dict.fromkeys(modes, WRITE_RUN + told))
    compare("r.toml", modes, [0], tmp_path / "out", jobs=3, command=command, console=Console(file=io.StringIO()))
    seen = [(tmp_path / "out" / mode / "log.txt").read_text().split()[-1] for mode in modes]
    assert seen == ["3", "5", "3"]


def test_summary_table_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, lines = tmp_path / "out", io.StringIO()
    summary = compare(
        "r.toml", ["qat", "bf16"], [0, 1], out, jobs=2, command=fake(), console=Console(file=lines, width=80)
    )
    stored = json.loads((out / "summary.json").read_text())
    assert stored == json.loads(json.dumps(summary))
    ratio = stored["methods"]["qat"]["logprob_abs_diff_over_bf16"]
    assert ratio == {"median": 2.0, "min": 2.0, "max": 2.0, "per_seed": [2.0, 2.0]}
    assert (stored["modes"], stored["seeds"], stored["steps"], stored["jobs"]) == (
        ["qat", "bf16"],
        [0, 1],
        2,
        2,
    )
    assert {"commit", "command", "hardware", "versions", "threads_per_run"} <= stored.keys()
    assert stored["versions"]["torch"]
    assert set(stored["wall_seconds"]) == {"total", "qat", "bf16"}
    table = (out / "table.md").read_text()
    assert table.index("| qat |") < table.index("| bf16 |")
    assert "median of 2 seeds (0, 1)" in table
    threads = stored["threads_per_run"]
    assert (out / "qat" / "log.txt").read_text() == f"training qat with {threads} threads\n"
    assert "qat: started\n" in lines.getvalue()
    assert "bf16: done (" in lines.getvalue()
    printed = capsys.readouterr().out
    assert "reward" in printed
    assert f"written: {out / 'summary.json'}" in printed


def test_progress_bars_on_a_terminal(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True)
    compare("r.toml", ["bf16"], [0], tmp_path, command=fake(), console=console)
    assert "bf16" in screen.getvalue()
    assert "2/2" in screen.getvalue()


def test_a_failing_child_is_shown_and_the_others_are_ended(tmp_path: Path) -> None:
    lines = io.StringIO()
    with pytest.raises(CompareError) as caught:
        compare(
            "r.toml",
            ["trace", "qat"],
            [0],
            tmp_path,
            jobs=2,
            command=fake(trace=SLEEP, qat="import time; time.sleep(1)\n" + FAIL),
            console=Console(file=lines, width=80),
        )
    assert str(caught.value) == (
        f"the run of qat failed with exit code 3; its whole log is {tmp_path / 'qat' / 'log.txt'}; "
        "go on with --resume once that is mended"
    )
    assert caught.value.exit_code == 1
    assert lines.getvalue().endswith("log.txt:\n  loading\n  out of luck\n")
    assert not alive(read_pid(tmp_path / "trace" / "pid"))
    assert not (tmp_path / "summary.json").exists()


def test_a_child_that_dies_by_a_signal_is_named(tmp_path: Path) -> None:
    script = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(CompareError, match="the run of qat ended by signal SIGKILL"):
        compare("r.toml", ["qat"], [0], tmp_path, command=fake(qat=script), console=Console(file=io.StringIO()))


def test_at_most_jobs_run_at_once_and_none_starts_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(CompareError):
        compare(
            "r.toml",
            ["a", "b"],
            [0],
            tmp_path,
            jobs=1,
            command=fake(a=FAIL),
            console=Console(file=io.StringIO()),
        )
    assert not (tmp_path / "b").exists()


PARENT = """
import sys
from pathlib import Path
from tracefp4 import compare
compare.GRACE_SECONDS = 0.5
def command(recipe, mode, seeds, folder, overrides):
    return [sys.executable, "-c", sys.argv[2], mode, str(folder)]
compare.compare("r.toml", ["a", "b"], [0], sys.argv[1], jobs=2, command=command)
"""


@pytest.mark.parametrize(
    ("signum", "script"),
    [
        (signal.SIGINT, SLEEP),
        (signal.SIGTERM, SLEEP),
        (signal.SIGHUP, SLEEP),
        (signal.SIGINT, STUBBORN),
        (signal.SIGKILL, WATCHING),
    ],
    ids=["ctrl-c", "terminated", "hung-up", "stubborn-child", "killed"],
)
def test_children_end_with_the_parent(tmp_path: Path, signum: signal.Signals, script: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), str(tmp_path), script], stderr=subprocess.PIPE
    )
    try:
        children = [read_pid(tmp_path / mode / "pid") for mode in ("a", "b")]
        assert all(alive(pid) for pid in children)
        os.kill(parent.pid, signum)
        parent.communicate(timeout=10)
    finally:
        parent.kill()
    assert parent.returncode != 0
    assert wait_for(lambda: not any(alive(pid) for pid in children))


HALF_RUN = WRITE_RUN.replace('(run / "final.json")', 'raise SystemExit(3)\n    (run / "final.json")')
FINISH = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[2])
print("resumed with", sys.argv[-1])
for seed in sys.argv[3].split(","):
    (folder / f"seed{seed}" / "final.json").write_text("{}")
"""
COMPLETE = WRITE_RUN.replace('"{}"', "'{\"steps\": 2}'")


def test_resume_skips_what_is_complete_and_gives_the_same_table(tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    compare("r.toml", ["bf16", "qat"], [0, 1], whole, jobs=1, command=fake(), console=quiet)
    commands = fake(bf16=COMPLETE, qat=HALF_RUN)
    with pytest.raises(CompareError, match="go on with --resume"):
        compare("r.toml", ["bf16", "qat"], [0], broken, jobs=1, command=commands, console=quiet)
    # bf16 is complete and would fail if it were started.
    commands = fake(bf16=FAIL, qat=FINISH)
    compare("r.toml", ["bf16", "qat"], [0], broken, jobs=1, resume=True, steps=2, command=commands, console=quiet)
    assert (broken / "qat/log.txt").read_text().endswith("resumed with --resume\n")
    assert (broken / "qat/log.txt").read_text().startswith("training qat")
    compare("r.toml", ["bf16", "qat"], [0, 1], broken, overwrite=True, jobs=1, command=fake(), console=quiet)
    assert (broken / "table.md").read_bytes() == (whole / "table.md").read_bytes()
    request = json.loads((broken / "compare.json").read_text())
    assert (request["modes"], request["seeds"]) == (["bf16", "qat"], [0, 1])


def test_resume_keeps_the_first_command_and_counts_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = Console(file=io.StringIO())
    first = compare("r.toml", ["bf16"], [0], tmp_path, command=fake(bf16=COMPLETE), console=quiet)
    table = (tmp_path / "table.md").read_bytes()
    monkeypatch.setattr(sys, "argv", ["tracefp4", "compare", "--resume"])
    again = compare("r.toml", ["bf16"], [0], tmp_path, resume=True, steps=2, command=fake(bf16=FAIL), console=quiet)
    assert again["command"] == first["command"]
    assert [r["command"] for r in again["resumes"]] == ["tracefp4 compare --resume"]
    assert (tmp_path / "table.md").read_bytes() == table


@pytest.mark.parametrize(("modes", "seeds", "what"), [(["bf16"], [0, 1], "qat"), (["bf16", "qat"], [1], "0")])
def test_resume_refuses_to_leave_runs_out(tmp_path: Path, modes: list[str], seeds: list[int], what: str) -> None:
    quiet = Console(file=io.StringIO())
    compare("r.toml", ["bf16", "qat"], [0, 1], tmp_path, command=fake(), console=quiet)
    with pytest.raises(ConfigError, match=f"the comparison to resume has {what} too"):
        compare("r.toml", modes, seeds, tmp_path, resume=True, command=fake(), console=quiet)
    assert (tmp_path / "table.md").exists()


def test_a_second_comparison_in_the_folder_is_refused(tmp_path: Path) -> None:
    with folder_lock(tmp_path), pytest.raises(StorageError, match=f"is in use by process {os.getpid()} on "):
        compare("r.toml", ["bf16"], [0], tmp_path, resume=True, command=fake(), console=Console(file=io.StringIO()))
    compare("r.toml", ["bf16"], [0], tmp_path, command=fake(), console=Console(file=io.StringIO()))


@pytest.mark.parametrize(
    ("modes", "seeds", "overrides", "jobs", "sentence"),
    [
        ([], [0], [], None, "--modes names nothing to run"),
        (["a"], [], [], None, "--seeds names nothing to run"),
        (["a", "b", "a"], [0], [], None, "--modes names a twice"),
        (["a"], [1, 1], [], None, "--seeds names 1 twice"),
        (["a"], [0], [], 0, "--jobs must be at least 1, got 0"),
        (
            ["a"],
            [0],
            ["method.name=b"],
            None,
            "the override 'method.name=b' contradicts --modes, which sets method.name in a comparison",
        ),
        (
            ["a"],
            [0],
            ["run.seed = 1"],
            None,
            "the override 'run.seed = 1' contradicts --seeds, which sets run.seed in a comparison",
        ),
    ],
)
def test_wrong_requests(
    tmp_path: Path, modes: list[str], seeds: list[int], overrides: list[str], jobs: int | None, sentence: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        compare("r.toml", modes, seeds, tmp_path / "out", overrides, jobs, command=fake())
    assert str(caught.value) == sentence
    assert not (tmp_path / "out").exists()


def test_a_full_folder_is_refused_and_overwriting_replaces_only_these_runs(tmp_path: Path) -> None:
    quiet = Console(file=io.StringIO())
    compare("r.toml", ["bf16", "qat"], [0], tmp_path, command=fake(), console=quiet)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="is not empty: choose another with --out or pass --overwrite"):
        compare("r.toml", ["bf16"], [0], tmp_path, command=fake(), console=quiet)
    summary = compare("r.toml", ["bf16"], [0], tmp_path, overwrite=True, command=fake(), console=quiet)
    assert summary["steps"] == 2  # not four: the old metrics went
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "qat" / "seed0" / "metrics.jsonl").exists()
    with pytest.raises(CompareError):
        compare("r.toml", ["bf16"], [0], tmp_path, overwrite=True, command=fake(bf16=FAIL), console=quiet)
    assert not (tmp_path / "table.md").exists()  # a failed comparison shows no old table
