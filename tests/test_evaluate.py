"""`tracefp4 eval`: figures from the responses on disk, the same after any interruption, one sentence per mistake."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny import tiny_checkpoint, tiny_config
from tracefp4 import evaluate as evaluation
from tracefp4.align.passrate import paired_difference, pass_rates
from tracefp4.cli import main
from tracefp4.errors import TracefpError
from tracefp4.evaluate import EvalRequest, evaluate, load_target
from tracefp4.files import folder_lock
from tracefp4.loop import Parts, RunConfig
from tracefp4.report.eval_table import caption
from tracefp4.report.html import report
from tracefp4.report.runs import ReportError
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.tasks import Prompt
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig

RECIPE = """
[model]
path = "{path}"
[method]
name = "trace"
[sampling]
max_new_tokens = 8
[rollout]
max_num_seqs = 6
max_model_len = 64
[run]
threads = 1
"""
REQUEST = EvalRequest(problems=7, samples=2)  # chunks of 3, 3 and 1 problem


def graded(self: Parts, prompts: Sequence[Prompt], trajectories: Sequence[Any], _: object) -> list[float]:
    """A random policy solves nothing; rewards by the tokens' sum tell forms and problems apart all the same."""
    return [(sum(t.response_ids) % 3) / 2 for t in trajectories]


@pytest.fixture(autouse=True)
def rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parts, "score", graded)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    path = folder / "r.toml"
    path.write_text(RECIPE.format(path=tiny_checkpoint(folder / "model", tiny_config())))
    return path


@pytest.fixture
def config(recipe: Path) -> RunConfig:
    return load_target(str(recipe), [])


def lines(out: Path, form: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"responses-{form}.jsonl").read_text().splitlines()]


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["eval", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


# -- figures --------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_responses_on_disk(config: RunConfig, tmp_path: Path) -> None:
    request = EvalRequest(problems=7, samples=4, ks=(1, 2, 4))
    facts = evaluate(config, tmp_path, request)
    assert json.loads((tmp_path / "eval.json").read_text()) == json.loads(json.dumps(facts))
    arrays = {}
    for form in ("bf16", "fp4"):
        written = lines(tmp_path, form)
        assert [line["id"] for line in written] == [f"test-{i}" for i in range(7)]
        samples = [s for line in written for s in line["samples"]]
        assert len(samples) == 28
        arrays[form] = np.array([[s["reward"] for s in line["samples"]] for line in written])
        rates, figures = pass_rates(arrays[form], (1, 2, 4)), facts["forms"][form]
        assert figures["avg"] == rates.avg.as_dict()
        assert figures["pass_at"] == {str(k): rates.at_k[k].as_dict() for k in (1, 2, 4)}
        assert figures["response_length_mean"] == sum(s["tokens"] for s in samples) / 28
        assert figures["truncated_share"] == sum(s["finish_reason"] == "length" for s in samples) / 28
        assert figures["tokens_per_second"] > 0
        assert (figures["dtype"], figures["overlong"]) == ("bfloat16", 0)
    difference = facts["differences"]["fp4"]
    assert difference["minus"] == "bf16"
    assert difference["avg"] == paired_difference(arrays["fp4"], arrays["bf16"]).as_dict()
    a, b = arrays["fp4"] >= 1, arrays["bf16"] >= 1
    assert difference["flipped"]["value"] == pytest.approx((a != b).mean())
    assert difference["gained"] == (a & ~b).mean()
    assert difference["lost"] == (b & ~a).mean()
    assert difference["pass_at"]["4"]["value"] == pytest.approx(a.any(1).mean() - b.any(1).mean())
    assert facts["forms"]["bf16"]["recipe_hash"] != facts["forms"]["fp4"]["recipe_hash"]
    assert lines(tmp_path, "bf16") != lines(tmp_path, "fp4")


def test_forms_are_paired_by_seed_and_methods_are_forms_too(config: RunConfig, tmp_path: Path) -> None:
    """Without quantization nothing changes but the dtype of the control; `naive` is what `fp4` is."""
    facts = evaluate(config, tmp_path / "a", EvalRequest(problems=4, samples=2, forms=("naive", "fp32")))
    assert [f["dtype"] for f in facts["forms"].values()] == ["bfloat16", "float32"]
    assert facts["differences"]["fp32"]["minus"] == "naive"
    evaluate(config, tmp_path / "b", EvalRequest(problems=4, samples=2, forms=("fp4",)))
    assert lines(tmp_path / "a", "naive") == lines(tmp_path / "b", "fp4")
    # The default's first and last k, and no difference of a single form.
    alone = json.loads((tmp_path / "b/eval.json").read_text())
    assert (alone["k"], alone["differences"]) == ([1, 2], {})


def test_problems_default_to_the_recipes_own_number(config: RunConfig, tmp_path: Path) -> None:
    chosen = config.model_copy(update={"run": config.run.model_copy(update={"eval_prompts": 2})})
    facts = evaluate(chosen, tmp_path, EvalRequest(samples=1, forms=("bf16",)))
    assert facts["settings"]["--problems"] == len(lines(tmp_path, "bf16")) == 2


def test_prompts_that_do_not_fit_count_as_failed(config: RunConfig, tmp_path: Path) -> None:
    """Also where a whole chunk (of one problem here) is not asked."""
    sampling = config.sampling.model_copy(update={"max_prompt_tokens": 10})
    request = EvalRequest(problems=7, samples=6)
    facts = evaluate(config.model_copy(update={"sampling": sampling}), tmp_path, request)
    written = lines(tmp_path, "fp4")
    overlong = [line for line in written if line["overlong"]]
    assert 0 < len(overlong) < 7
    assert all(len(line["prompt"]) > 10 and line["samples"] == [] for line in overlong)
    figures = facts["forms"]["fp4"]
    assert figures["overlong"] == len(overlong)
    total = sum(s["reward"] for line in written for s in line["samples"])
    assert figures["avg"]["value"] == pytest.approx(total / 42)
    assert f"; {len(overlong)} of the prompts do not fit and count as failed" in caption(facts)


class Echo(RunningSums):
    """Two turns: the environment asks for more after the first."""

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        return "+1=" if len(turns) == 1 else None

    def score(self, prompt: Prompt, response_text: str) -> float:
        return float(len(response_text) % 2)


def test_a_task_of_ones_own_of_several_turns(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real scores
    roomy = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_new_tokens": 40})})
    facts = evaluate(roomy, tmp_path, REQUEST, task=Echo(RunningSumsConfig()))
    samples = [s for form in facts["forms"] for line in lines(tmp_path, form) for s in line["samples"]]
    ended = [s for s in samples if s["finish_reason"] == "stop"]
    assert ended
    for s in ended:
        assert "+1=" in s["text"]
        # Two turns, each ended by a token that is no text; the model has a few more that the tokenizer does not write.
        assert s["tokens"] >= len(s["text"]) - len("+1=") + 2


# -- going on -------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "score", graded)
        evaluate(load_target(str(recipe), []), out, REQUEST)
    return out


def same_result(out: Path, whole: Path) -> bool:
    facts, expected = (json.loads((folder / "eval.json").read_text()) for folder in (out, whole))
    for of in (facts, expected):
        for form in of["forms"].values():
            del form["tokens_per_second"]
    return (
        facts["complete"]
        and all(
            (out / f"responses-{form}.jsonl").read_bytes() == (whole / f"responses-{form}.jsonl").read_bytes()
            for form in ("bf16", "fp4")
        )
        and (facts["forms"], facts["differences"]) == (expected["forms"], expected["differences"])
    )


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_an_interrupted_evaluation_goes_on(
    call: int, config: RunConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, calls = RolloutEngine.generate, [0]

    def counted(self: RolloutEngine, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise Killed
        return generate(self, *args, **more)

    monkeypatch.setattr(RolloutEngine, "generate", counted)
    with pytest.raises(Killed):
        evaluate(config, tmp_path, REQUEST)
    assert not json.loads((tmp_path / "eval.json").read_text())["complete"]
    calls[0] = 100
    evaluate(config, tmp_path, REQUEST, resume=True)
    assert calls[0] == 100 + 6 - (call - 1)  # no chunk is answered twice
    assert same_result(tmp_path, whole)
    facts = json.loads((tmp_path / "eval.json").read_text())
    assert len(facts["resumes"]) == 1
    assert facts["forms"]["bf16"]["tokens_per_second"] > 0


@pytest.mark.parametrize("cut", [-1, -40, 10], ids=["line-feed", "half-a-line", "first-line"])
def test_what_a_kill_left_behind_is_answered_again(cut: int, config: RunConfig, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    for name in ("responses-fp4.jsonl", "timing.jsonl"):
        (out / name).write_bytes((out / name).read_bytes()[:cut])
    evaluate(config, out, REQUEST, resume=True)
    assert same_result(out, whole)
    assert all(json.loads(line)["seconds"] > 0 for line in (out / "timing.jsonl").read_text().splitlines())


def test_a_complete_evaluation_is_only_summed_up_again(
    config: RunConfig, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    monkeypatch.setattr(RolloutEngine, "generate", lambda *_, **__: pytest.fail("nothing is left to answer"))
    facts = evaluate(config, out, EvalRequest(problems=7, samples=2, ks=(2,)), resume=True)
    assert list(facts["forms"]["fp4"]["pass_at"]) == ["2"]
    evaluate(config, out, REQUEST, resume=True)
    assert same_result(out, whole)


def test_forms_can_be_added_and_not_left_out(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    facts = evaluate(config, out, EvalRequest(7, 2, forms=("bf16", "fp4", "fp32")), resume=True)
    assert list(facts["differences"]) == ["fp4", "fp32"]
    assert same_result(out, whole) is False  # one form more
    with pytest.raises(TracefpError, match="was evaluated in the form fp32 too: give all of bf16,fp4,fp32 in --forms"):
        evaluate(config, out, REQUEST, resume=True)


def other_seed(config: RunConfig) -> tuple[RunConfig, EvalRequest]:
    return config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})}), REQUEST


def other_temperature(config: RunConfig) -> tuple[RunConfig, EvalRequest]:
    return config.model_copy(update={"sampling": config.sampling.model_copy(update={"temperature": 0.5})}), REQUEST


def more_samples(config: RunConfig) -> tuple[RunConfig, EvalRequest]:
    return config, EvalRequest(7, 3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_seed, "run.seed = 0, now it is 1: set it back, or evaluate into another --out"),
        (other_temperature, "sampling.temperature = 1.0, now it is 0.5"),
        (more_samples, "--samples = 2, now it is 3"),
    ],
)
def test_other_settings_are_refused(
    change: Callable[[RunConfig], tuple[RunConfig, EvalRequest]], sentence: str, config: RunConfig, whole: Path
) -> None:
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    with pytest.raises(TracefpError, match="was evaluated with") as caught:
        evaluate(*change(config)[:1], whole, change(config)[1], resume=True)
    assert sentence in str(caught.value)
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_other_weights_and_other_problems_are_refused(config: RunConfig, whole: Path, tmp_path: Path) -> None:
    weights = tiny_checkpoint(tmp_path / "model", tiny_config(), seed=1)
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": str(weights)})})
    with pytest.raises(TracefpError, match=r"was evaluated with other weights than .*model holds"):
        evaluate(other, whole, REQUEST, resume=True)
    # The same weights elsewhere are the same weights.
    moved = shutil.copytree(config.model.path, tmp_path / "moved")
    shutil.copytree(whole, tmp_path / "out")
    other = config.model_copy(update={"model": config.model.model_copy(update={"path": str(moved)})})
    evaluate(other, tmp_path / "out", REQUEST, resume=True)

    class Others(RunningSums):
        def test_prompts(self, n: int) -> list[Prompt]:
            return super().test_prompts(n + 1)[1:]

    with pytest.raises(TracefpError, match="line 1 answers another problem than the task's test-1, so its data have"):
        evaluate(config, tmp_path / "out", REQUEST, resume=True, task=Others(RunningSumsConfig()))


# -- the command line -----------------------------------------------------------------------------------------------


def test_the_command_prints_one_table(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: Path
) -> None:
    assert run(recipe, "--out", tmp_path / "out", "--problems", 7, "--samples", 2, "--k", "1,2") == 0
    assert same_result(tmp_path / "out", whole)
    out, err = capsys.readouterr()
    head = next(line for line in out.splitlines() if "bf16" in line)
    assert head.replace("┃", " ").split() == ["bf16", "fp4", "fp4", "-", "bf16"]
    for what in ("avg@2", "pass@1", "pass@2", "outcomes flipped", "truncated responses", "tokens per second"):
        assert what in out
    assert "7 held-out problems x 2 samples of " in out
    assert f"written: {tmp_path / 'out' / 'eval.json'}" in out
    assert "eval fp4: response 14/14" in err
    assert "do not fit" not in out


def test_a_run_folder_its_checkpoints_and_the_report(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "run", ["sampling.prompts_per_step=2", "sampling.samples_per_prompt=2"]
    short = ["run.steps=1", "run.eval_prompts=3", "run.tensorboard=false", "method.name=fp32"]
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), *settings, *short, "--out", str(folder)])
    assert caught.value.code == 0
    assert run(folder, "--out", folder / "eval", "--samples", 1) == 0
    facts = json.loads((folder / "eval/eval.json").read_text())
    assert facts["settings"]["--problems"] == 3
    assert facts["checkpoint"]["path"] == str(folder / "checkpoint")
    assert [f["dtype"] for f in facts["forms"].values()] == ["bfloat16", "bfloat16"]  # the forms', not the method's
    capsys.readouterr()
    assert run(folder, "--out", tmp_path / "best", "--checkpoint", "best") == 2
    assert "has no checkpoint-best/ (run.keep_best=1 keeps one): name another" in capsys.readouterr().err
    # A report takes the run, and not what lies in it or beside it.
    assert run(recipe, "--out", tmp_path / "beside", "--problems", 1, "--samples", 1) == 0
    report([tmp_path], tmp_path / "report.html")
    assert "from 1 run folder." in (tmp_path / "report.html").read_text()
    with pytest.raises(ReportError, match=r"beside is an evaluation, whose figures are in its eval\.json"):
        report([tmp_path / "beside"])


BAD = [
    (["--samples", 0], "--samples must be at least 1, got 0"),
    (["--problems", 0], "--problems must be at least 1, got 0"),
    (["--samples", 4, "--k", "1,8"], "--k 8 needs at least 8 samples a problem and --samples is 4"),
    (["--k", "0"], "--k must be at least 1, got 0"),
    (["--k", "one"], "--k must be whole numbers joined by commas"),
    (["--k", "2,2"], "--k names 2 twice"),
    (["--forms", ","], "--forms names nothing to evaluate"),
    (["--forms", "bf61"], "unknown form 'bf61' in --forms; did you mean bf16"),
    (["--forms", "fp4,fp4"], "--forms names fp4 twice"),
    (
        ["--forms", "fp4,trace"],
        "fp4 and trace run the same numbers (what a method records changes no response)",
    ),
    (["--problems", 10**6], "--problems 1000000 cannot be met: "),
    (["--checkpoint", "best"], "--checkpoint best is of a run folder, and "),
    (["--checkpoint", "nowhere"], "--checkpoint nowhere is no Hugging Face checkpoint directory"),
    (["--resume", "--overwrite"], "give one of them"),
    (["sampling.temprature=1"], "unknown key sampling.temprature"),
    (["sampling.max_prompt_tokens=1"], "every prompt exceeds 1 tokens"),
    (
        ["quant.weights=none", "quant.activations=none", "quant.kv=none"],
        "has nothing to quantize: quant.weights, quant.activations and quant.kv",
    ),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[s[:40] for _, s in BAD])
def test_bad_input_is_one_sentence(
    arguments: list[object], sentence: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, "--out", tmp_path / "out", *arguments) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_targets_that_are_none(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs/trace/seed0").mkdir(parents=True)
    (tmp_path / "runs/trace/seed0/config.json").write_text("{}")
    model = recipe.parent / "model"
    for target, sentence in (
        (tmp_path / "none", "there is neither a run folder nor a recipe at "),
        (tmp_path / "none.toml", "there is no recipe at "),
        (tmp_path / "runs", f"give one, such as {tmp_path / 'runs/trace/seed0'}, or a recipe"),
        (model, f"is a checkpoint, not a run: give a recipe and --checkpoint {model}"),
        (tmp_path / "runs/trace/seed0", "has no checkpoint/ (a run writes it at its end"),
    ):
        assert run(target, "--out", tmp_path / "out") == 2
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_folders_that_hold_something(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: RunConfig
) -> None:
    out, mine = tmp_path / "out", tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    shutil.copytree(whole, out)
    small = ["--problems", 2, "--samples", 1]
    assert run(recipe, "--out", out, *small) == 2
    assert "is not empty: choose another --out, go on with --resume or replace" in capsys.readouterr().err
    for flag in ("--resume", "--overwrite"):
        assert run(recipe, "--out", mine, *small, flag) == 2
        assert "holds no evaluation and is left alone" in capsys.readouterr().err
    assert [p.name for p in mine.iterdir()] == ["notes.txt"]
    with folder_lock(out):
        assert run(recipe, "--out", out, *small, "--overwrite") == 2
    assert "is in use by process" in capsys.readouterr().err
    (out / "responses-qat.jsonl").write_text("of a form that is no more\n")
    (out / "notes.txt").write_text("mine")
    assert run(recipe, "--out", out, *small, "--overwrite") == 0
    assert not (out / "responses-qat.jsonl").exists()
    assert (out / "notes.txt").exists()
    assert len(lines(out, "bf16")) == 2
    (out / "eval.json").write_text("{")
    assert run(recipe, "--out", out, *small, "--resume") == 2
    assert "eval.json cannot be read" in capsys.readouterr().err
    shutil.rmtree(out)
    shutil.copytree(whole, out)
    (out / "responses-fp4.jsonl").write_text('{"id": 3}\n' * 7)
    with pytest.raises(TracefpError, match=r"responses-fp4\.jsonl line 1 is damaged"):
        evaluate(config, out, REQUEST, resume=True)


def test_ctrl_c_leaves_a_folder_to_go_on_with(
    recipe: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, calls = RolloutEngine.generate, [0]

    def counted(self: RolloutEngine, *args: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return generate(self, *args, **more)

    monkeypatch.setattr(RolloutEngine, "generate", counted)
    asked = ["--out", tmp_path / "out", "--problems", 7, "--samples", 2]
    assert run(recipe, *asked) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("stopped by SIGINT with problems answered: 7 of bf16, 3 of fp4; go on with: tracefp4 eval ")
    again = said.partition("go on with: tracefp4 eval ")[2].split()
    assert run(*again) == 0
    assert same_result(tmp_path / "out", whole)


def test_a_killed_process_leaves_a_folder_to_go_on_with(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the real scores, as in the other process
    out, asked = tmp_path / "out", ["--problems", "90", "--samples", "2", "--forms", "fp4"]
    command = [sys.executable, "-m", "tracefp4", "eval", str(recipe), *asked, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while evaluation.answered(out, ["fp4"])["fp4"] < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL
    before = (out / "responses-fp4.jsonl").read_bytes()
    assert run(recipe, *asked, "--out", out, "--resume") == 0
    after = (out / "responses-fp4.jsonl").read_bytes()
    assert after.startswith(before[: before.rindex(b"\n") + 1])
    assert after.count(b"\n") == 90
