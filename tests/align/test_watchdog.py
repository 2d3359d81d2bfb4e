"""Watchdogs: each speaks at the right step of a sick series, none of healthy ones, and a resumed run hears the same."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.align.watch_remedies import FALLBACKS
from tracefp4.align.watch_rules import RULES, trend
from tracefp4.align.watchdog import Event, Level, Watch, WatchConfig
from tracefp4.cli import main
from tracefp4.config import resolved
from tracefp4.loop import RunConfig, run_training

Metrics = dict[str, float]
Line = dict[str, Any]

RECORDED: dict[str, dict[str, list[float]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "healthy_runs.json").read_text()
)
"""Of 60 steps of recipes/learn.toml, bf16 and trace, seeds 0 to 2, at commit 61fd3a0; four digits."""

SETTINGS = resolved(RunConfig())


def recorded(run: str = "trace-seed0") -> list[Metrics]:
    columns = RECORDED[run]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def bootstrapped(run: str, steps: int, seed: int, block: int = 10) -> list[Metrics]:
    """A healthy series of any length: blocks of a recorded one, so that neighbouring steps stay correlated."""
    lines, rng = recorded(run), random.Random(seed)
    out: list[Metrics] = []
    while len(out) < steps:
        start = rng.randrange(len(lines) - block)
        out += lines[start : start + block]
    return out[:steps]


def sick(name: str, value: Callable[[int, float], float | None], start: int = 20, steps: int = 60) -> list[Line]:
    """A recorded healthy run of which one figure goes wrong: ``value(steps since start, healthy value)``."""
    lines: list[Line] = [dict(line) for line in bootstrapped("trace-seed0", steps, seed=0)]
    for step in range(start, steps):
        lines[step][name] = value(step - start, lines[step].get(name, 0.0))
    return lines


def events_of(lines: list[Line], level: str = "warn", first: int = 0, **watch: Any) -> list[Event]:
    """What a fresh Watch says over these lines, those before ``first`` replayed."""
    on = {rule.name: level for rule in RULES}
    w = Watch(WatchConfig(**{**on, **watch}), SETTINGS)
    w.replay({**line, "step": step} for step, line in enumerate(lines[:first]))
    return [event for step in range(first, len(lines)) for event in w.see(step, lines[step])]


def fallback(reason: str) -> list[Line]:
    lines = sick("guidance/guided_share", lambda i, v: 0.6)
    for line in lines[20:]:
        line |= {f"guidance/fallback/{name}": 400.0 if name == reason else 3.0 for name in FALLBACKS}
    return lines


MISMATCH = "mismatch/logprob_abs_diff_mean"

CASES: dict[str, tuple[str, list[Line], int]] = {
    "a jump of the mismatch": ("mismatch", sick(MISMATCH, lambda i, v: 5 * v), 22),
    "a jump of bf16": (
        "mismatch",
        [{MISMATCH: 0.002 if i < 20 else 0.02} for i in range(30)],
        22,
    ),
    "a mismatch too large from the start": ("mismatch", sick(MISMATCH, lambda i, v: 0.15, start=0), 2),
    "a mismatch that grows 2 % a step": ("mismatch_drift", sick(MISMATCH, lambda i, v: v * 1.02**i, steps=90), 53),
    "one token": ("mismatch_max", sick("mismatch/logprob_abs_diff_max", lambda i, v: 12.0), 22),
    "entropy sinks": ("entropy_collapse", sick("train/entropy", lambda i, v: v * 0.8**i), 33),
    "entropy below the floor from the first step": (
        "entropy_collapse",
        sick("train/entropy", lambda i, v: 0.005, start=0),
        2,
    ),
    "entropy rises": ("entropy_explosion", sick("train/entropy", lambda i, v: v * 1.2**i), 29),
    "all problems too hard": (
        "no_advantage",
        [{"train/no_advantage_share": 1.0 if i >= 20 else 0.2, "reward/mean": 0.02} for i in range(25)],
        22,
    ),
    "most problems too easy": (
        "no_advantage",
        [{"train/no_advantage_share": 0.95 if i >= 20 else 0.2, "reward/mean": 0.99} for i in range(35)],
        29,
    ),
    "nothing is NaN but one": ("nonfinite", sick("mismatch/kl_k3", lambda i, v: None), 20),
    "infinity": ("nonfinite", sick("train/loss", lambda i, v: math.inf), 20),
    "a spike of the gradient": ("grad_norm", sick("train/grad_norm", lambda i, v: 25 * v if i == 0 else v), 20),
    "importance weights": ("importance", sick("tis/clip_frac", lambda i, v: 0.03), 22),
    "weights of whole responses": (
        "sequence_weight",
        [{"tbpo/weight_far_share": 0.05 if i >= 20 else 0.0, "tbpo/weight_mean": 1.02} for i in range(25)],
        22,
    ),
    "responses cut off": ("truncation", sick("response/truncated_share", lambda i, v: 0.7), 22),
    "no more reward": ("reward_zero", sick("reward/mean", lambda i, v: 0.0), 29),
    "never a reward": ("reward_zero", sick("reward/mean", lambda i, v: 0.0, start=0), 9),
    "collapse at the third step": ("mismatch", sick(MISMATCH, lambda i, v: 10 * v, start=2), 4),
    "entropy collapse at the third step": ("entropy_collapse", sick("train/entropy", lambda i, v: 0.01, start=2), 4),
    "entropy explosion at the third step": ("entropy_explosion", sick("train/entropy", lambda i, v: 1.5, start=2), 4),
    "all groups fail after a collapse": (
        "no_advantage",
        [{"train/no_advantage_share": float(i > 9), "reward/mean": 0.3 * (i < 10) + 0.01} for i in range(20)],
        12,
    ),
    "old weights": ("lag", sick("policy/lag", lambda i, v: 4.0), 20),
    **{f"fallback: {reason}": ("guidance", fallback(reason), 22) for reason in FALLBACKS},
}


@pytest.mark.parametrize("case", CASES)
def test_speaks_at_the_right_step_and_alone(case: str) -> None:
    name, lines, step = CASES[case]
    heard = [event for event in events_of(lines) if event.name == name]
    assert [event.step for event in heard][:1] == [step]
    assert heard[0].level == "warn"
    others = {event.name for event in events_of(lines) if event.step <= step} - {name}
    assert not others


def test_there_is_a_case_for_every_watchdog_and_a_setting_for_each() -> None:
    names = {rule.name for rule in RULES}
    assert {name for name, _, _ in CASES.values()} == names
    assert names == {n for n, f in WatchConfig.model_fields.items() if f.annotation == Level}


@pytest.mark.parametrize("case", CASES)
def test_messages_name_keys_that_exist(case: str) -> None:
    name, lines, _ = CASES[case]
    methods = ("bf16", "naive", "qat", "trace", "trace-all")
    for method in methods:
        config = RunConfig.model_validate({"method": {"name": method}})
        w = Watch(WatchConfig(mismatch_max="warn"), resolved(config))
        said = [event for step, line in enumerate(lines) for event in w.see(step, line) if event.name == name]
        message = said[0].message
        keys = set(re.findall(r"\b([a-z][a-z_]*)\.([a-z][a-z_]*)\b", message))
        assert keys, message
        for section, key in keys:
            assert section in RunConfig.model_fields, message
            assert key in type(getattr(config, section)).model_fields, message
        for section in re.findall(r"\[([a-z]+)\]", message):
            assert section in RunConfig.model_fields
        assert str(said[0].step) in message
        assert message.count(". ") <= 1  # two sentences at most
        assert message.endswith(".")
        assert f"(now {config.train.lr})" in message or "train.lr" not in message


def test_a_message_reads_as_it_should() -> None:
    (event,) = [
        e for e in events_of([{MISMATCH: 0.002 if i < 20 else 0.02} for i in range(30)]) if e.name == "mismatch"
    ]
    assert event.message == (
        "mismatch/logprob_abs_diff_mean is 0.02 at step 22, 10 times this run's start (0.002) for 3 or more steps in a "
        "row: trainer and rollout no longer give the same tokens the same probability. Nothing is quantized here, so "
        "the updates are too large: lower train.lr (now 5e-05) or train.updates_per_rollout (now 4)."
    )
    assert event.figures == {"value": 0.02, "start": 0.002, "ratio": 10.0}


def test_what_to_do_depends_on_the_figures() -> None:
    def message(case: str) -> str:
        name, lines, _ = CASES[case]
        return next(e.message for e in events_of(lines) if e.name == name)

    assert "too hard: make those of [task] easier" in message("all problems too hard")
    assert "too easy: make those of [task] harder" in message("most problems too easy")
    assert "fallen from 0.31 to 0.01: the policy has collapsed" in message("all groups fail after a collapse")
    assert "the last reward was at step 19: the policy has collapsed" in message("no more reward")
    assert "no response was ever right" in message("never a reward")
    assert "Guide every layer with method.name=trace-all (now trace)" in message("a jump of the mismatch")


def test_the_dominating_reason_is_named() -> None:
    for reason, (why, _) in FALLBACKS.items():
        event = next(e for e in events_of(fallback(reason)) if e.name == "guidance")
        assert f"'{reason}': {why}" in event.message
        assert event.figures[f"fallback/{reason}"] == 400


# Healthy runs


@pytest.mark.parametrize("run", RECORDED)
def test_recorded_healthy_runs_are_silent(run: str) -> None:
    assert events_of(recorded(run)) == []


def test_false_alarms_on_bootstrapped_healthy_runs() -> None:
    """60 runs of 300 steps with every watchdog on: not one may speak (18,000 steps)."""
    for seed in range(10):
        for run in RECORDED:
            assert events_of(bootstrapped(run, 300, seed)) == [], (run, seed)


def test_an_outlier_as_the_first_value_is_no_start() -> None:
    assert events_of(sick(MISMATCH, lambda i, v: v / 100 if i == 0 else v, start=0)) == []


def test_a_single_outlier_is_no_mismatch() -> None:
    assert events_of(sick(MISMATCH, lambda i, v: 20 * v if i % 3 != 2 else v)) == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_mismatch_rules_know_no_scale(seed: int, factor: float) -> None:
    """A figure in other units fires at the same steps, between what is negligible and what is too large anyway."""
    rng = random.Random(seed)
    rate = rng.uniform(1.0, 1.04)
    line = [0.05 * rate**i * rng.lognormvariate(0, 0.2) for i in range(150)]
    spoken = [(e.step, e.name) for e in events_of([{MISMATCH: v} for v in line], mismatch_limit=1e9)]
    assert spoken == [(e.step, e.name) for e in events_of([{MISMATCH: v * factor} for v in line], mismatch_limit=1e9)]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_mismatch_of_fp32_paths_is_never_an_alarm(seed: int) -> None:
    rng = random.Random(seed)
    assert events_of([{MISMATCH: rng.lognormvariate(math.log(1e-7), 1.0)} for _ in range(100)]) == []


def test_trend_against_a_known_line() -> None:
    steps = list(range(50))
    values = [1.0 + 0.1 * s for s in steps]
    values[7], values[30] = 90.0, -40.0  # outliers hardly move it
    slope, last, z = trend(steps, values)
    assert slope == pytest.approx(0.1, abs=1e-3)
    assert last == pytest.approx(5.9, abs=0.05)
    assert z > 8
    assert trend(steps, [2.0] * 50) == (0.0, 2.0, 0.0)


# Patience, cool-down, levels


def test_cool_down_and_much_worse() -> None:
    def steps_of(lines: list[Line], **watch: Any) -> list[int]:
        return [e.step for e in events_of(lines, cooldown=15, **watch) if e.name == "mismatch"]

    steady = sick(MISMATCH, lambda i, v: 0.01)
    assert steps_of(steady) == [22, 37, 52]
    doubled = sick(MISMATCH, lambda i, v: 0.01 if i < 6 else 0.022)
    assert steps_of(doubled) == [22, 28, 43, 58]  # three steps of twice as much
    spike = sick(MISMATCH, lambda i, v: 0.05 if i == 8 else 0.01)
    assert steps_of(spike) == [22, 37, 52]
    assert steps_of(steady, mismatch="off") == []


def test_missing_metrics_neither_add_nor_take_patience() -> None:
    lines = sick("train/entropy", lambda i, v: 0.001)
    del lines[21]["train/entropy"]
    assert [e.step for e in events_of(lines)] == [23]


def test_stop_is_reported_and_has_no_cool_down() -> None:
    heard: list[Event] = []
    w = Watch(WatchConfig(truncation="stop"), SETTINGS, heard.append)
    lines = sick("response/truncated_share", lambda i, v: 0.9)
    assert [w.check(step, line) for step, line in enumerate(lines[:23])] == [False] * 22 + [True]
    assert w.stopped is heard[0]
    assert w.summary()["steps"] == 23
    assert w.summary()["stopped_by"]["name"] == "truncation"
    later = events_of(lines, truncation="stop", first=23)
    assert [e.step for e in later if e.name == "truncation"][:2] == [25, 28]  # the full patience again


def test_without_an_event_there_is_no_summary() -> None:
    assert Watch(WatchConfig()).summary() == {}


# Resume


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_watch_says_the_same(case: str) -> None:
    _, lines, step = CASES[case]
    whole = events_of(lines, cooldown=7)
    # As metrics.jsonl holds them: null for what is not finite.
    stored = json.loads(
        json.dumps([{n: v if v is None or math.isfinite(v) else None for n, v in x.items()} for x in lines])
    )
    for cut in (0, 3, step - 1, step, step + 1, len(lines)):
        assert events_of(stored, cooldown=7, first=cut) == [e for e in whole if e.step >= cut]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 119))
def test_any_series_any_cut(seed: int, cut: int) -> None:
    rng = random.Random(seed)
    names = {name: 10 ** rng.uniform(-3, 1) for rule in RULES for name in rule.needs}
    lines: list[Line] = [
        {
            n: None if rng.random() < 0.02 else v * rng.lognormvariate(0, 1)
            for n, v in names.items()
            if rng.random() < 0.9
        }
        for _ in range(120)
    ]
    assert events_of(lines, first=cut) == [e for e in events_of(lines) if e.step >= cut]


# In a run


RECIPE = """
[method]
name = "trace-all"
[sampling]
prompts_per_step = 2
samples_per_prompt = 2
max_new_tokens = 2
[train]
micro_batch_size = 4
[run]
steps = 6
probe_every = 0
state_every = 2
threads = 1
tensorboard = false
[watch]
patience = 2
cooldown = 2
reward_zero = "off"
"""


def cut_off(**watch: Any) -> RunConfig:
    """Every response is cut off after 2 tokens: truncation speaks at steps 1, 3, 5 and no_advantage with it."""
    import tomllib

    data = tomllib.loads(RECIPE)
    data["watch"] |= watch
    return RunConfig.model_validate(data)


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run_training(cut_off(), folder)
    return folder


def test_events_of_a_run(unbroken: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (unbroken / "events.jsonl").read_text().splitlines()]
    assert [(line["step"], line["name"]) for line in lines] == [
        (step, name) for step in (1, 3, 5) for name in ("no_advantage", "truncation")
    ]
    assert {line["level"] for line in lines} == {"warn"}
    assert all(set(line) == {"step", "name", "level", "message", "figures"} for line in lines)


@pytest.mark.parametrize("step", [1, 2, 4])
def test_events_are_byte_stable_on_resume(step: int, unbroken: Path, tmp_path: Path) -> None:
    def on_step(index: int, _: Metrics) -> None:
        if index == step:
            raise Stop

    with pytest.raises(Stop):
        run_training(cut_off(), tmp_path, on_step)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"figures": {"sh')  # a kill in the middle of a line
    run_training(cut_off(), tmp_path, resume=True)
    for name in ("events.jsonl", "metrics.jsonl"):
        assert (tmp_path / name).read_bytes() == (unbroken / name).read_bytes()


def test_stop_ends_a_run_cleanly_and_resume_goes_on(
    unbroken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, out = tmp_path / "r.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    command = ["train", str(recipe), "--out", str(out)]
    with pytest.raises(SystemExit) as caught:
        main([*command, "watch.truncation=stop", "watch.no_advantage=off"])
    assert caught.value.code == 3
    captured = capsys.readouterr()
    assert "stop: truncation: 100% of the responses at step 1 were cut off" in captured.err
    assert "stopped by watch.truncation after step 1; --resume goes on" in captured.out
    final = json.loads((out / "final.json").read_text())
    assert final["steps"] == 2
    assert final["stopped_by"]["name"] == "truncation"
    assert final["stopped_by"]["step"] == 1
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert (out / "checkpoint" / "model.safetensors").is_file()
    assert (out / "states" / "step-00000002").is_dir()

    with pytest.raises(SystemExit) as caught:
        main([*command, "watch.truncation=off", "--resume"])  # the watch may change on resume
    assert caught.value.code == 0
    assert "stopped_by" not in json.loads((out / "final.json").read_text())
    assert (out / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


def test_several_seeds_go_on_after_a_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, out = tmp_path / "r.toml", tmp_path / "out"
    recipe.write_text(RECIPE)
    with pytest.raises(SystemExit) as caught:
        main(["train", str(recipe), "watch.truncation=stop", "--out", str(out), "--seeds", "0,1"])
    assert caught.value.code == 3
    assert [(out / f"seed{s}" / "final.json").is_file() for s in (0, 1)] == [True, True]
