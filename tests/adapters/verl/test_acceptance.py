"""The bounds of `make test-verl`; runs without verl."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from processes import alive, read_pid, wait_for
from scripts import load_script

RECIPES = Path(__file__).parents[3] / "recipes" / "verl"
acceptance, reward = load_script(RECIPES / "acceptance.py"), load_script(RECIPES / "sums_reward.py")


def lines(diff: float, share: float | None = None) -> list[dict[str, float]]:
    step = {acceptance.DIFF: diff} | ({} if share is None else {acceptance.SHARE: share})
    return [step, dict(step)]


def test_a_run_within_all_bounds_passes() -> None:
    steps = {"bf16": lines(0.001), "qat": lines(0.008), "trace": lines(0.0015, 0.995)}
    assert acceptance.broken_bounds(steps) == []


@pytest.mark.parametrize(
    ("mode", "changed", "words"),
    [
        ("trace", lines(0.0016, 1.0), "trace: 1.60 times"),
        ("trace", lines(0.001, 0.98), "trace: only 98.00% of the eligible rows"),
        ("trace", lines(0.001), "trace logged no guidance/guided_share"),
        ("qat", lines(0.002), "qat: 2.00 times"),
    ],
)
def test_every_bound_can_break(mode: str, changed: list[dict[str, float]], words: str) -> None:
    steps = {"bf16": lines(0.001), "qat": lines(0.008), "trace": lines(0.001, 1.0)} | {mode: changed}
    (sentence,) = acceptance.broken_bounds(steps)
    assert sentence.startswith(words)


class FakeRun:
    """In place of a run of verl: ``answer`` gets its arguments, and gives its steps; None means it goes on."""

    def __init__(self, answer: Any, *arguments: Any) -> None:
        self.mode, self.seconds, self.child = arguments[1], 1.0, acceptance.Child(arguments[1], [], arguments[0], ())
        self._answer = partial(answer, *arguments)

    def start(self) -> None:
        pass

    def result(self) -> Any:
        return self._answer()

    def end(self) -> None:
        pass


def run_main(monkeypatch: pytest.MonkeyPatch, out: Path, run: Any, *arguments: str) -> Any:
    """Exit code of the script, with ``run`` in place of whole runs."""
    monkeypatch.setattr(acceptance, "Run", partial(FakeRun, run))
    monkeypatch.setattr(acceptance, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(acceptance.metadata, "version", lambda name: "0")  # verl may not be installed
    monkeypatch.setattr("sys.argv", ["acceptance.py", str(out), *arguments])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    return ended.value.code


def test_overrides_may_follow_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def run(folder: Path, mode: str, steps: int, overrides: list[str], *_: Any) -> list[dict[str, float]]:
        asked.append((mode, steps, overrides[-2:]))
        return lines(0.001)

    assert run_main(monkeypatch, tmp_path, run, "--modes", "bf16", "a.b=1", "--steps", "2", "c=3") == 0
    assert asked == [("bf16", 2, ["a.b=1", "c=3"])]


def test_the_rows_are_written_as_json_and_markdown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    logged = {"bf16": lines(0.001), "trace": lines(0.0012, 1.0)}
    assert run_main(monkeypatch, tmp_path, lambda _, mode, *__: logged[mode], "--modes", "bf16,trace") == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [(row["mode"], row["guided"]) for row in table["rows"]] == [("bf16", None), ("trace", 1.0)]
    assert table["rows"][1]["over_bf16"] == pytest.approx(1.2)
    assert "torch" in table["provenance"]["versions"]
    markdown = (tmp_path / "table.md").read_text()
    assert "| sync:1 | trace | 2 | 0.00120 | 1.20x | 100.00% |" in markdown
    assert r"| mean \|dlogp\| |" in markdown


def test_rows_that_come_out_of_order_end_in_order_each_over_its_bf16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at a time: bf16 goes on for longest, and qat begins once trace has ended."""
    logged, asked = {"bf16": lines(0.001), "trace": lines(0.0012, 1.0), "qat": lines(0.008)}, []

    def run(folder: Path, mode: str, *_: Any) -> Any:
        asked.append(mode)
        return None if mode == "bf16" and asked.count(mode) < 4 else logged[mode]

    assert run_main(monkeypatch, tmp_path, run, "--jobs", "2", "--modes", "bf16,trace,qat") == 0
    assert asked == ["bf16", "trace", "bf16", "qat", "bf16", "bf16"]
    printed = [line.split()[:5] for line in capsys.readouterr().out.splitlines() if line.startswith("sync:1")]
    assert [row[1] for row in printed] == ["trace", "qat", "bf16", "bf16", "trace", "qat"]
    assert [row[4] for row in printed[3:]] == ["1.00x", "1.20x", "8.00x"]
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(row["mode"], row["over_bf16"]) for row in rows] == [
        ("bf16", 1), ("trace", pytest.approx(1.2)), ("qat", pytest.approx(8))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--jobs", "0"], "--jobs must be at least 1"), (["--modes", "qat,qat"], "one twice")]
)
def test_what_would_share_a_folder_or_never_begin_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    assert run_main(monkeypatch, tmp_path, None, *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_run_that_there_was_no_time_for_is_no_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: Path, mode: str, *_: Any) -> list[dict[str, float]]:
        if mode == "qat":
            raise TimeoutError("mode qat was stopped after 1 s")
        return lines(0.001)

    assert run_main(monkeypatch, tmp_path, run, "--seconds", "100", "--modes", "bf16,qat") == 1
    assert "broken: sync:1: mode qat was stopped" in capsys.readouterr().err
    assert run_main(monkeypatch, tmp_path, run, "--seconds", "1e-9", "--modes", "bf16") == 1
    assert "broken: sync:1: no time left for bf16" in capsys.readouterr().err


def scripted(tmp_path: Path, text: str) -> Path:
    """A copy of the script beside a run_cpu.sh of this text."""
    for name, content in (("acceptance.py", (RECIPES / "acceptance.py").read_text()), ("run_cpu.sh", text)):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    return tmp_path / "acceptance.py"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def result_of(run: Any) -> Any:
    run.start()
    while (result := run.result()) is None:
        time.sleep(0.02)
    return result


def test_a_run_past_its_time_is_ended(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "__file__", str(scripted(tmp_path, "#!/bin/sh\nexec sleep 60\n")))
    run = acceptance.Run(tmp_path / "run", "bf16", 1, [], seconds=0.2)
    with pytest.raises(TimeoutError, match="mode bf16 was stopped after 0 s"):
        result_of(run)
    assert run.child.process.poll() == -signal.SIGTERM
    assert not list(temporary.iterdir())


# Its Ray folder is the last but one argument. Two workers left a log, one of them a traceback.
FAILS = """#!/bin/sh
for last; do temp=$before; before=$last; done
logs=${temp#*=}/session_latest/logs
mkdir -p "$logs"
echo "Traceback (most recent call last): of $last" | tee "$logs/worker-1.err"
echo no torchtitan: ModuleNotFoundError > "$logs/worker-2.err"
exit 3
"""


def test_a_failed_run_shows_the_ends_of_its_logs_and_of_its_own_clusters(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(acceptance, "__file__", str(scripted(tmp_path, FAILS)))
    run = acceptance.Run(tmp_path / "run", "qat", 1, ["a.b=1"])
    with pytest.raises(SystemExit, match=r"mode qat ended with code 3; see .*/run/log.txt and .*/temporary/ray"):
        result_of(run)
    run.end()
    (left,) = temporary.iterdir()  # Ray's logs stay
    said = "Traceback (most recent call last): of a.b=1"
    assert capsys.readouterr().err.splitlines() == [
        f"==> {tmp_path / 'run' / 'log.txt'} <==", said,
        f"==> {left / 'session_latest' / 'logs' / 'worker-1.err'} <==", said,
    ]  # fmt: skip


def test_only_the_last_lines_of_a_log_are_shown(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("begun\n" * 100 + "ended\n")
    text = acceptance.log_ends(tmp_path, tmp_path, lines=2)
    assert text.splitlines() == [f"==> {tmp_path / 'log.txt'} <==", "begun", "ended"]


# As verl's driver: it ends its cluster, a process that would go on without it, and then itself.
WAITS = """#!/bin/sh
sleep 300 &
trap 'kill $!; exit 1' TERM
echo $! > "$1/pid"
wait
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_jobs(tmp_path: Path, temporary: Path, signum: int) -> None:
    arguments = [str(tmp_path), "--jobs", "2", "--modes", "bf16,qat,trace"]
    command = [sys.executable, str(scripted(tmp_path, WAITS)), *arguments]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    files = [tmp_path / mode / "pid" for mode in ("bf16", "qat")]
    pids = [read_pid(file) for file in files]
    assert len(list(temporary.iterdir())) == 2
    script.send_signal(signum)
    assert script.wait(60) == 128 + signum
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "trace").exists()
    assert not list(temporary.iterdir())


def test_a_run_that_does_not_end_is_killed(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance, "__file__", str(scripted(tmp_path, WAITS.replace("kill $!; exit 1", ""))))
    monkeypatch.setattr(acceptance, "GRACE_SECONDS", 0.2)
    run = acceptance.Run(tmp_path / "run", "bf16", 1, [])
    run.start()
    pid = read_pid(tmp_path / "run" / "pid")
    run.end()
    assert run.child.poll() == -signal.SIGKILL
    assert wait_for(lambda: not alive(pid))
    assert not list(temporary.iterdir())


def test_jobs_on_a_gpu_find_one_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, before they look for it; FOLDER/../policy, unless SUMS_MODEL names one."""
    made = []
    monkeypatch.setattr(acceptance, "make_policy", made.append)
    monkeypatch.delenv("SUMS_MODEL", raising=False)
    answer = lambda *_: lines(0.001)  # noqa: E731
    assert run_main(monkeypatch, tmp_path, answer, "--device", "gpu", "--modes", "bf16", "--jobs", "2") == 0
    monkeypatch.setenv("SUMS_MODEL", "/elsewhere")
    assert run_main(monkeypatch, tmp_path, answer, "--device", "gpu", "--modes", "bf16") == 0
    assert made == [tmp_path / "policy", Path("/elsewhere")]


def test_a_policy_is_made_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another interpreter in Python's place, which writes down what it was asked to run."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$1" >> "$2.said"\nmkdir "$2"\ntouch "$2/config.json"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    for _ in range(2):
        acceptance.make_policy(tmp_path / "policy")
    (script,) = (tmp_path / "policy.said").read_text().splitlines()
    assert Path(script) == RECIPES.parents[1] / "benchmarks" / "larger_policy.py"
    assert Path(script).exists()


@pytest.mark.parametrize(("device", "platform"), [("cpu", "cpu"), ("gpu", "nvidia")])
def test_both_scripts_start_the_same_recipe(tmp_path: Path, device: str, platform: str) -> None:
    """With another interpreter in Python's place, which says what it was asked to run."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$VERL_PLATFORM $(basename "$SUMS_MODEL") $*"\n')
    python.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SUMS_", "VERL_"))}
    environment["PYTHON"] = str(python)
    command = [str(RECIPES / f"run_{device}.sh"), str(tmp_path / "out"), "a.b=1"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[-1].startswith(f"{platform} ")
    assert "-m verl.trainer.main_ppo" in said[-1]
    assert said[-1].endswith("trainer.device=cuda a.b=1" if device == "gpu" else "hydra.output_subdir=null a.b=1")
    assert ("larger_policy.py" in said[0] and said[-1].split()[1] == "policy") == (device == "gpu")


def test_a_second_start_keeps_the_metrics_of_the_first(tmp_path: Path) -> None:
    """verl's file logger opens its file anew, also where a run is resumed."""
    out = tmp_path / "out"
    out.mkdir()
    for i in range(3):
        (out / "metrics.jsonl").write_text(f"start {i}\n")
        command = [str(RECIPES / "run_cpu.sh"), str(out)]
        subprocess.run(command, env={**os.environ, "PYTHON": "true", "SUMS_MODEL": "none"}, check=True)
    assert [(out / f"metrics-{i + 1}.jsonl").read_text() for i in range(3)] == [f"start {i}\n" for i in range(3)]
    assert not (out / "metrics.jsonl").exists()


def test_a_mode_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["acceptance.py", str(tmp_path / "out"), "--modes", "bf16,trase"])
    with pytest.raises(SystemExit) as ended:
        acceptance.main()
    assert ended.value.code == 2
    assert "trase" in (said := capsys.readouterr().err)
    assert "trace" in said
    assert not (tmp_path / "out").exists()


def test_steps_are_read_from_verls_file_logger(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logged = [{"step": 0, "data": {"val/reward": 1.0}}, {"step": 1, "data": {acceptance.DIFF: 0.5}}]
    path.write_text("".join(json.dumps(line) + "\n" for line in logged))
    assert acceptance.read_metrics(path) == [{acceptance.DIFF: 0.5}]


@pytest.mark.parametrize(
    ("text", "score"), [("a14+27=41;#41", 1.0), ("#41<eos>#3", 1.0), ("#40", 0.0), ("41", 0.0), ("#4x", 0.0), ("", 0.0)]
)
def test_the_reward_of_running_sums(text: str, score: float) -> None:
    assert reward.compute_score("running_sums", text, "41") == score


def test_differences_of_asynchronous_shapes_are_not_compared_but_their_guided_rows_are() -> None:
    steps = {"bf16": lines(0.001), "trace": lines(0.9, 0.98)}
    (sentence,) = acceptance.broken_bounds(steps, lagging=True)
    assert sentence.startswith("trace: only 98.00%")


def test_a_shape_is_a_mode_and_ranks() -> None:
    for shape in acceptance.ALL:
        keys = acceptance.shape_overrides(shape)
        mode, _, ranks = shape.partition(":")
        assert f"trainer.n_gpus_per_node={ranks}" in keys
        assert ("ray_kwargs.ray_init.num_gpus=3" in keys) == (shape == "separate_async:2")
        assert any("agents.yaml" in key for key in keys) == (mode == "turns")
    for shape in ("sync", "async:1", "sync:0", "sync:x"):
        with pytest.raises(SystemExit, match="is no shape"):
            acceptance.shape_overrides(shape)
