"""watch.command is told what happens, and never ends or holds up a run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tracefp4.loop import RunConfig, run_training
from tracefp4.report.notify import Notifier


def test_messages_arrive_as_json_on_standard_input(tmp_path: Path) -> None:
    notifier = Notifier(f"cat >> {tmp_path}/said", 30.0, {"run": "runs/x"})
    notifier.send("warning", 'it\'s "drifting"; $(touch no)', step=4)
    notifier.close()
    assert json.loads((tmp_path / "said").read_text()) == {
        "kind": "warning",
        "message": 'it\'s "drifting"; $(touch no)',
        "run": "runs/x",
        "step": 4,
    }


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("echo no mail here >&2; exit 3", "failed with exit code 3 (no mail here)"),
        ("sleep 60", "took more than 0.2 s and was ended"),
        ("/no/such/program", "failed with exit code 127"),
    ],
)
def test_a_command_that_fails_is_warned_about_once(
    command: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notifier = Notifier(command, 0.2 if "sleep" in command else 30.0, {})
    before = time.monotonic()
    notifier.send("warning", "a")
    assert time.monotonic() - before < 5  # the run does not wait
    notifier.close()
    notifier.send("warning", "b")
    notifier.close()
    assert capsys.readouterr().err.count(sentence) == 1


def test_a_run_tells_how_it_ended(tmp_path: Path) -> None:
    said = tmp_path / "said"
    settings = {
        "sampling": {"prompts_per_step": 1, "samples_per_prompt": 2, "max_new_tokens": 4},
        "run": {"steps": 1, "eval_prompts": 1, "tensorboard": False, "probe_every": 0},
        "watch": {"command": f"cat >> {said}"},
    }
    (tmp_path / "run").mkdir()
    run_training(RunConfig.model_validate(settings), tmp_path / "run")
    message = json.loads(said.read_text())
    assert message["kind"] == "done"
    assert message["message"].startswith("done after 1 steps: held-out pass rate ")
    assert message["run"] == str(tmp_path / "run")
    assert message["final"]["steps"] == 1
