"""Figures and pages of made-up runs, and the pack that travels."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tracefp4.cli import main
from tracefp4.errors import TracefpError
from tracefp4.reproduce.pack import pack, unpack
from tracefp4.reproduce.page import table_rows, verdict, write_results
from tracefp4.reproduce.plan import Plan, make_plan, read_plan, stored_request
from tracefp4.reproduce.results import control, gather
from tracefp4.reproduce.runner import INVOCATIONS, Limits, run_plan, steps_done

MakeUp = Callable[..., Plan]


def finished(plan: Plan, seconds: float | None = None) -> Plan:
    import time

    deadline = None if seconds is None else time.monotonic() + seconds
    run_plan(plan, Limits(3, deadline), lambda _: None)
    return plan


def test_figures_of_a_table(made_up: MakeUp) -> None:
    plan = finished(made_up(sources={"naive": "raise SystemExit(1)"}))
    table = gather(plan)["tables"]["dynamics"]
    assert table["control"] == {"stable": True, "why": "bf16 stays at 0.8 or above after its rise, in every seed"}
    qat = table["arms"]["qat"]
    assert qat["diff_mean"]["mean"] == pytest.approx(5e-3 * 1.05)
    assert qat["diff_mean"]["se"] == pytest.approx(5e-3 * 0.05)
    assert qat["diff_over_control"] == pytest.approx(5.0)
    assert qat["diff_max_over_seeds"] == 15.0
    assert qat["scores"]["fp4"]["mean"] == pytest.approx(0.8)
    assert qat["scores"]["bf16"]["mean"] == pytest.approx(0.9)
    assert (qat["collapse"], qat["form"], qat["seconds"]) == ([None, None], "fp4", [44.0, 44.0])
    pair = table["differences"]["own"]["qat"]["bf16"]
    assert (pair["value"], pair["low"], pair["high"]) == pytest.approx((-0.1, -0.1, -0.1))
    assert table["differences"]["fp4"]["trace"]["qat"]["value"] == pytest.approx(0.1)
    assert verdict(table).startswith("Control stable: bf16 stays at 0.8")


def test_figures_of_the_first_steps(made_up: MakeUp, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the runs that have come as far; scores are of the last step, so there are none."""
    plan = finished(made_up(seeds=(0,)))
    log = next(s for s in plan.specs if s.arm.name == "trace").run_dir / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:7]))
    results = gather(plan, 8)
    arms = results["tables"]["dynamics"]["arms"]
    assert {name: (arm["steps"], arm["done"]) for name, arm in arms.items()} == {
        "bf16": ([8], 1), "qat": ([8], 1), "trace": ([None], 0),
    }  # fmt: skip
    assert arms["qat"]["diff_over_control"] == pytest.approx(5.0)
    assert arms["qat"]["diff_over_control_worst"] == pytest.approx(5.0)
    assert arms["qat"]["scores"] == dict.fromkeys(("own", "fp4", "bf16"))
    assert results["tables"]["dynamics"]["control"]["stable"] is not None  # it has these steps, so it can be told
    with pytest.raises(SystemExit) as exit:
        main(["reproduce", "table", str(plan.out), "--until", "8"])
    assert not exit.value.code
    assert f"written in {plan.out}: first-8-steps.md" in capsys.readouterr().out
    assert "| qat | 8 |" in (plan.out / "first-8-steps.md").read_text()
    assert not (plan.out / "results.md").exists()
    with pytest.raises(SystemExit) as exit:
        main(["reproduce", "table", str(plan.out), "--until", "99"])
    assert exit.value.code == 2
    assert f"no run in {plan.out} has come to step 99: the furthest has 20 steps" in capsys.readouterr().err


def test_an_unstable_control_invalidates_the_table(made_up: MakeUp) -> None:
    plan = made_up(seeds=(0,))
    run = {"done": True, "stopped": None, "control": {"rise": 30, "fall": 90, "low": 0.61, "stable": False}}
    found = control({0: run})
    assert found == {"stable": False, "why": "seed 0 fell below 0.8 in step 90 (lowest 0.61)"}
    finished(plan)
    results = gather(plan)
    table = results["tables"]["dynamics"]
    table["control"] = found
    assert verdict(table).endswith("This comparison is not valid: its rows do not rank methods.")
    assert table_rows(table)[1][0][0] == "bf16 (control unstable)"
    never = {"done": True, "stopped": None, "control": {"rise": None, "fall": None, "low": None}}
    assert control({0: never})["why"] == "seed 0 never rose to 0.8"
    assert control({0: never | {"done": False}}) == {"stable": None, "why": "bf16 has not finished"}
    assert control({0: never | {"stopped": {"step": 9}}})["why"] == "seed 0 stopped in step 9"
    assert control(None)["stable"] is None


def test_all_pages_are_written(made_up: MakeUp) -> None:
    plan = finished(made_up())
    written = write_results(plan, read_plan(plan.out), gather(plan))
    assert written == ["results.json", "results.md", "results.html", "report.html", "figures/dynamics/"]
    text = (plan.out / "results.md").read_text()
    assert "| qat | 20 | 0.00525 +- 0.00025 | 5.00x | 5.00x | 15 |" in text
    assert "-0.100 [-0.100, -0.100]" in text
    assert "Seeds 0, 1; 20 steps." in text
    assert "cpu time of 1 invocations together" in text
    page = (plan.out / "results.html").read_text()
    assert page.count("<figure>") == 4
    assert "Policy: 2 layers of width 32, 4 experts, 2 a token; task: running_sums; warm start tiny-2-" in page
    assert "<dt>qat</dt><dd>FP4 rollout" in page
    assert "Bold lines are means over seeds" in page
    assert "Differences of every pair of rows" in page
    assert "\u00b1" in page
    assert page.count("<svg") >= 4
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    pictures = {path.name for path in (plan.out / "figures/dynamics").iterdir()}
    assert pictures == {
        f"{name}.png"
        for name in ("reward-mean", "mismatch-logprob_abs_diff_mean", "train-entropy", "response-length_mean")
    }
    stored = json.loads((plan.out / "results.json").read_text())
    assert {"commit", "command", "hardware", "versions", "tables", "invocations", "seeds"} <= stored.keys()


@pytest.mark.parametrize("cut", ['{"seconds": 3', "\0\0\0", "{}\n"])
def test_an_invocation_that_a_power_failure_cut_off_costs_no_table(
    made_up: MakeUp, cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = finished(made_up())
    log = plan.out / INVOCATIONS
    whole = log.read_text()
    log.write_text(whole + cut)
    assert len(gather(plan)["invocations"]) == 1
    assert "broken line: the device time of that invocation is not counted" in capsys.readouterr().err
    finished(plan)  # goes on, and its own line is whole
    assert log.read_text().startswith(whole + cut)
    assert len(gather(plan)["invocations"]) == 2


def test_a_table_without_any_run(made_up: MakeUp) -> None:
    plan = made_up()
    results = gather(plan)
    assert write_results(plan, read_plan(plan.out), results) == ["results.json", "results.md", "results.html"]
    _, rows = table_rows(results["tables"]["dynamics"])
    assert rows[1] == ["qat", "0, 0 of 2 done", *["-"] * 13]
    assert verdict(results["tables"]["dynamics"]) == "Not yet a comparison: bf16 has not finished."


def test_a_diverged_run_is_a_collapse(made_up: MakeUp) -> None:
    plan = made_up(seeds=(0,))
    finished(plan)
    plan.specs[1].failure.write_text(json.dumps({"step": 12, "reason": "the run diverged in step 12"}))
    arm = gather(plan)["tables"]["dynamics"]["arms"]["qat"]
    assert arm["collapse"] == [12]
    assert arm["stopped"] == {"0": {"step": 12, "reason": "the run diverged in step 12"}}


def test_a_pack_travels_and_goes_on(made_up: MakeUp, tmp_path: Path) -> None:
    plan = made_up(steps=30, pause=0.05, modes=("bf16", "trace"), seeds=(0,))
    finished(plan, seconds=0.8)
    half = steps_done(plan.specs[0])
    assert 0 < half < 30
    facts = pack(plan, tmp_path / "pack")
    assert sorted(facts["states"]) == [spec.name for spec in plan.specs]  # type: ignore[call-overload]
    assert facts["anew"] == []
    there = tmp_path / "there"
    unpack(tmp_path / "pack", there / "out")
    moved = make_plan(stored_request(read_plan(there / "out")), there / "out")
    assert steps_done(moved.specs[0]) == half
    assert all((start / "warmstart.json").is_file() for start in moved.starts)
    assert list((moved.specs[0].run_dir / "states").iterdir())
    with pytest.raises(TracefpError, match="holds a plan already: unpack into another folder"):
        unpack(tmp_path / "pack", there / "out")


def test_a_pack_keeps_to_its_size(made_up: MakeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefp4.reproduce.pack.PART_MEGABYTES", 0.1)
    plan = made_up(steps=30, pause=0.05, modes=("bf16", "trace"), seeds=(0,))
    finished(plan, seconds=0.8)
    rng = np.random.default_rng(0)
    (next(iter(plan.starts)) / "model.safetensors").write_bytes(rng.bytes(150_000))
    facts = pack(plan, tmp_path / "pack", 0.4)  # a state takes .2 MB, the start .15
    assert (len(facts["states"]), len(facts["anew"])) == (1, 1)  # type: ignore[arg-type]
    parts = sorted(path.name for path in (tmp_path / "pack").glob("state.*"))
    assert len(parts) == facts["parts"] == 4
    assert all(path.stat().st_size <= 100_000 for path in (tmp_path / "pack").glob("state.*"))
    with pytest.raises(TracefpError, match=r"takes 0\.2 MB: allow more MB"):
        pack(plan, tmp_path / "pack", 0.1)
    pack(plan, tmp_path / "pack", 0.4)
    (tmp_path / "pack" / parts[1]).unlink()
    with pytest.raises(TracefpError, match="lacks some of its 4 parts"):
        unpack(tmp_path / "pack", tmp_path / "elsewhere" / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(TracefpError, match="holds other files than a pack's"):
        pack(plan, tmp_path / "mine")


def test_policies_and_responses_stay_behind(made_up: MakeUp, tmp_path: Path) -> None:
    plan = finished(made_up(seeds=(0,)))
    pack(plan, tmp_path / "pack")
    unpack(tmp_path / "pack", tmp_path / "there/out")
    names = {path.name for path in (tmp_path / "there/out").rglob("*") if path.is_file()}
    assert {"scores.json", "metrics.jsonl", "final.json", "plan.json", "seed0.log"} <= names
    assert not names & {"weights", "responses-fp4.jsonl", "eval.json"}
    moved = make_plan(stored_request(read_plan(tmp_path / "there/out")), tmp_path / "there/out")
    assert moved.complete
    assert gather(moved)["tables"] == gather(plan)["tables"]
