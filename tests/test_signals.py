"""Ctrl-C and SIGTERM at every moment of a run: a state of the steps done so far, one line, and metrics as if nothing
had happened after --resume."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny import tiny_checkpoint, tiny_config
from tracefp4 import signals
from tracefp4.cli import main
from tracefp4.files import folder_lock
from tracefp4.loop import Parts, TrainingRun
from tracefp4.loop import run as loop
from tracefp4.report import RunLogger
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.train.checkpoint import latest_facts
from tracefp4.train.trainer import GRPOTrainer

RECIPE = """
[model]
path = "{path}"
[method]
name = "bf16"
[sampling]
prompts_per_step = 2
samples_per_prompt = 4
max_new_tokens = 6
[train]
lr = 1e-3
[rollout]
max_num_seqs = 8
max_model_len = 64
[run]
steps = 4
eval_prompts = 2
eval_every = 1
keep_best = 1
state_every = 10
threads = 1
tensorboard = false
"""


@pytest.fixture(scope="module", autouse=True)
def rewards() -> Iterator[None]:
    """A random policy solves nothing; rewards by the text's own letters make it learn something all the same."""

    def score(self: Parts, prompts: Any, trajectories: Any, _: None) -> list[float]:
        return [float(sum(t.response_ids) % 3 == 0) for t in trajectories]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "score", score)
        yield


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
    rates = [json.loads(line)["eval/pass_rate"] for line in (out / "metrics.jsonl").read_text().splitlines()[:-1]]
    rates.append(json.loads((out / "final.json").read_text())["eval/pass_rate_end"])
    best = json.loads((out / "checkpoint-best/best.json").read_text())
    assert best == {"step": rates.index(max(rates)) + 1, "pass_rate": max(rates), "n": 2}  # a tie keeps the earlier
    return out


def train(recipe: Path, out: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), "--out", str(out), *more])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def at_call(number: int, call: Callable[..., Any], act: Callable[[], object], after: bool = False) -> Any:
    """``call``, with ``act`` run at its n-th call, before it or within it at its end."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == number and not after:
            act()
        result = call(*args, **kwargs)
        if count == number and after:
            act()
        return result

    return wrapped


def send(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


MOMENTS = [
    # What is called, for the how manieth time, whether the signal comes at its end, and the steps that are saved.
    (RolloutEngine, "generate", 1, False, None),  # the evaluation before the first step
    (RolloutEngine, "generate", 4, False, 1),  # the second rollout: evaluation, rollout, evaluation, rollout
    (GRPOTrainer, "update", 2, False, 2),  # held until the update's end
    (GRPOTrainer, "_optimizer_step", 6, True, 2),  # half an update
    (TrainingRun, "evaluate", 3, False, 2),  # trained, not yet logged
    (RunLogger, "log", 2, False, 2),
    (RunLogger, "log", 2, True, 2),
    (TrainingRun, "save", 2, False, 2),  # of the best policy
    (TrainingRun, "evaluate", 5, False, None),  # at the very end: the last state is there
]


@pytest.mark.parametrize(("owner", "name", "number", "after", "steps"), MOMENTS)
def test_stopped_and_resumed(
    owner: type,
    name: str,
    number: int,
    after: bool,
    steps: int | None,
    recipe: Path,
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    if (owner, name) == (TrainingRun, "save"):
        number = 1
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, at_call(number, getattr(owner, name), send(signal.SIGTERM), after))
        assert train(recipe, out) == 143
    line = capsys.readouterr().err.splitlines()[-1]
    found = re.fullmatch(
        r"stopped by SIGTERM (before a state was written|with (\d) steps saved); go on with: (.*)", line
    )
    assert found is not None, line
    assert shlex.split(found[3])[1:] == ["train", str(recipe), "--out", str(out), "--resume"]
    if (owner, name) == (RolloutEngine, "generate") and number == 1:
        assert found[1] == "before a state was written"
        assert list(out.iterdir()) == []
    elif name != "save":
        assert int(found[2]) == (4 if steps is None else steps)
    main_arguments = shlex.split(found[3])[1:]
    with pytest.raises(SystemExit) as caught:
        main(main_arguments)
    assert caught.value.code == 0
    for file in ("metrics.jsonl", "final.json", "checkpoint/model.safetensors", "checkpoint-best/model.safetensors"):
        assert (out / file).read_bytes() == (whole / file).read_bytes(), file
    assert (out / "checkpoint-best/best.json").read_bytes() == (whole / "checkpoint-best/best.json").read_bytes()
    assert not [p for p in out.rglob("*") if p.name.startswith(".") or p.name == "run.lock"]


def test_a_second_signal_ends_at_once(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(GRPOTrainer, "_optimizer_step", at_call(6, GRPOTrainer._optimizer_step, twice))
    assert train(recipe, tmp_path / "out") == 130
    error = capsys.readouterr().err
    assert "stopping after this update; once more to stop at once\n" in error
    assert "stopped by SIGINT before a state was written" in error
    assert latest_facts(tmp_path / "out/states") is None


def test_no_state_where_none_is_wanted(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RolloutEngine, "generate", at_call(4, RolloutEngine.generate, send(signal.SIGHUP)))
    assert train(recipe, tmp_path / "out", "run.state_every=0") == 129
    assert not (tmp_path / "out/states").exists()
    assert "stopped by SIGHUP before a state was written; go on with:" in capsys.readouterr().err


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(s) for s in signals.SIGNALS]
    with signals.stoppable():
        assert signal.getsignal(signal.SIGTERM) not in before
        signals.hold()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(signals.Stopped, match="SIGTERM"):
            signals.release()
    assert [signal.getsignal(s) for s in signals.SIGNALS] == before


def test_a_second_run_in_the_folder_is_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with folder_lock(out):
        for more in ([], ["--resume"], ["--overwrite"]):
            assert train(recipe, out, *more) == 2
            assert f"error: {out} is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert list(out.iterdir()) == []


def test_another_setting_leaves_the_run_as_it_was(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(recipe, out, "run.steps=2") == 0
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    assert train(recipe, out, "train.lr=1e-4", "--resume") == 2
    assert "the run to resume has train.lr = 0.001, the recipe now says 0.0001" in capsys.readouterr().err
    assert train(recipe, out, "run.steps=1", "--resume") == 2
    assert f"{out} has 2 steps already: run.steps 1 is too few" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_run_json_tells_where_numbers_come_from(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train(recipe, out, "run.steps=2") == 0
    facts = json.loads((out / "run.json").read_text())
    assert {
        "python",
        "torch",
        "transformers",
        "tracefp4",
        "numpy",
        "safetensors",
        "reasoning-gym",
        "math-verify",
    } <= set(facts["versions"])
    assert facts["checkpoint"]["kind"] == "all bytes"
    assert {"commit", "os", "threads", "seed", "recipe_hash", "config_hash", "recipe", "hardware"} <= set(facts)
    assert facts["resumes"] == []
    now = loop.provenance()
    changed = {**now, "commit": "f" * 40, "versions": {**now["versions"], "torch": "9.9"}}
    monkeypatch.setattr(loop, "provenance", lambda: changed)
    capsys.readouterr()
    assert train(recipe, out, "run.steps=3", "--resume") == 0
    warning = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("warning"))
    assert "-> ffffffffffff" in warning
    assert f"torch {now['versions']['torch']} -> 9.9: its metrics may not be those of an unbroken run" in warning
    resumed = json.loads((out / "run.json").read_text())
    assert {k: v for k, v in resumed.items() if k != "resumes"} == {k: v for k, v in facts.items() if k != "resumes"}
    assert [(r["step"], r["commit"]) for r in resumed["resumes"]] == [(2, "f" * 40)]


def test_divergence_names_the_step_and_the_state(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise FloatingPointError("the policy loss is not finite")

    out = tmp_path / "out"
    monkeypatch.setattr(GRPOTrainer, "update", at_call(3, GRPOTrainer.update, broken))
    assert train(recipe, out, "run.state_every=1") == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: the run diverged in step 2: the policy loss is not finite; its last state is "
        f"{out / 'states/step-00000002'}; lower train.lr and train into another folder"
    )


def test_a_killed_comparison_takes_its_runs_along_and_resumes(recipe: Path, tmp_path: Path) -> None:
    """SIGKILL of the real command: its children write their states, end, and --resume gives the table."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "tracefp4", "compare", str(recipe), "--out", str(out), "run.eval_every=0"]
    command += ["run.keep_best=0", "run.steps=300", "--modes", "bf16", "--seeds", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    metrics, lock = out / "bf16/seed0/metrics.jsonl", out / "bf16/seed0/run.lock"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 2):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    while lock.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    facts = latest_facts(out / "bf16/seed0/states")
    assert facts is not None
    done = facts["step"]
    assert 2 <= done < 300
    assert "stopped by SIGTERM with" in (out / "bf16/log.txt").read_text()
    steps = f"run.steps={done + 1}"
    shorter = [*command[: command.index("run.steps=300")], steps]
    again = subprocess.run([*shorter, "--resume"], env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(done + 1))
    assert (out / "table.md").exists()


def test_ctrl_c_while_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tracefp4.__main__ import run

    class Interrupted:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "tracefp4.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "tracefp4.cli", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
