"""Figures of a command's runs: per run, over seeds, and as differences to the control and to each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tracefp4.files import warn
from tracefp4.report.logger import METRICS
from tracefp4.report.runs import Run, Series, load_run
from tracefp4.reproduce.experiments import CONTROL
from tracefp4.reproduce.plan import Plan, Spec, scores_of
from tracefp4.reproduce.runner import INVOCATIONS, step_time, timings
from tracefp4.reproduce.stats import (
    HOLD,
    Floats,
    Stability,
    collapse_step,
    difference,
    mean_and_error,
    ratio,
    score,
    stability,
    width_for,
)

DIFF = "mismatch/logprob_abs_diff"
OWN, FP4 = "own", "fp4"
FORMS = (OWN, FP4, CONTROL)
"""Of a score: in the form of the mode's own rollouts, in FP4, in BF16."""


def gather(plan: Plan, until: int | None = None) -> dict[str, Any]:
    """All figures: {"tables": {key: table}, "steps", "seeds", "complete", "invocations", "taken_over"}; of runs that
    are not done what there is so far. until: of the first so many steps, over the runs that have them; without scores,
    which are of the last."""
    tables = {table.key: table_figures(plan, table.key, until) for table in plan.experiment.tables}
    return {
        "tables": tables,
        "steps": plan.steps if until is None else until,
        "seeds": list(plan.seeds),
        "complete": plan.complete,
        "invocations": _invocations(plan.out / INVOCATIONS),
        "taken_over": {s.name: json.loads(s.origin.read_bytes())["run"] for s in plan.specs if s.origin.is_file()},
    }


def table_figures(plan: Plan, key: str, until: int | None = None) -> dict[str, Any]:
    """{"title", "note", "control", "arms": {name: figures}, "differences": {form: {name: {other: interval}}}}."""
    table = next(t for t in plan.experiment.tables if t.key == key)
    specs = plan.of_table(key)
    arms = {arm.name: [spec for spec in specs if spec.arm is arm] for arm in table.arms}
    logs = {name: {s.seed: _log(s, until) for s in of_arm} for name, of_arm in arms.items()}
    runs = {name: {s.seed: run_figures(s, logs[name][s.seed], until) for s in of_arm} for name, of_arm in arms.items()}
    rewards = {name: _scored(of_arm) if until is None else {} for name, of_arm in arms.items()}
    figures = {name: _over_seeds(arms[name], of_arm, rewards[name]) for name, of_arm in runs.items()}
    for name, of_arm in figures.items():
        found = ratio(_distances(logs[name]), _distances(logs.get(CONTROL, {})))
        of_arm["diff_over_control"] = found and found["mean"]
        of_arm["diff_over_control_worst"] = found and found["worst"]
    return {
        "title": table.title,
        "note": table.note,
        "control": control(runs.get(CONTROL)),
        "arms": figures,
        "runs": {name: {str(seed): run for seed, run in of_arm.items()} for name, of_arm in runs.items()},
        "differences": {form: _differences(rewards, form) for form in FORMS},
    }


# Runs


def _log(spec: Spec, until: int | None) -> Run | None:
    """What a run has logged; None for nothing. until: of its first so many steps, None for fewer, unless it failed."""
    path = spec.run_dir / METRICS
    if not spec.trains or not path.is_file() or not path.stat().st_size:
        return None
    run = load_run(spec.run_dir)
    if until is None:
        return run
    if run.steps_done < until and not spec.failed:
        return None
    kept = {name: Series(of.steps[of.steps < until], of.values[of.steps < until]) for name, of in run.series.items()}
    return replace(run, series={name: of for name, of in kept.items() if len(of.steps)})


def _distances(logs: dict[int, Run | None]) -> dict[int, Floats]:
    return {seed: _values(run, f"{DIFF}_mean") for seed, run in logs.items() if run is not None}


def run_figures(spec: Spec, run: Run | None, until: int | None = None) -> dict[str, Any]:
    """Figures of one run, None where it has not come to them. An arm that evaluates another's policy has no steps.

    run: its log, see `_log`. With `until` a run is done that has so many steps; the steps of others are None.
    """
    stopped = _failure(spec)
    if stopped and until is not None and stopped["step"] >= until:
        stopped = None
    planned = spec.steps if until is None else until
    figures: dict[str, Any] = {"steps": 0, "planned": planned, "done": spec.done, "stopped": stopped}
    figures |= dict.fromkeys(
        ("diff_mean", "diff_max", "code_before", "code_after", "reward_first", "reward_last", "collapse", "bytes")
    )
    figures["seconds"] = _seconds(spec)
    if run is None:
        return figures if until is None else figures | {"steps": None, "done": False}
    rewards = _values(run, "reward/mean")
    width = width_for(len(rewards))
    figures |= {
        "steps": run.steps_done,
        "diff_mean": _mean(run, f"{DIFF}_mean"),
        "diff_max": _most(run, f"{DIFF}_max"),
        "code_before": _mean(run, "code_mismatch/before"),
        "code_after": _mean(run, "code_mismatch/after"),
        "bytes": _mean(run, "guidance/bytes_per_token"),
        "reward_first": float(np.nanmean(rewards[:width])),
        "reward_last": float(np.nanmean(rewards[-width:])),
        "collapse": figures["stopped"]["step"] if figures["stopped"] else collapse_step(rewards),
        "control": _stability_facts(stability(rewards)),
    }
    if until is not None:
        figures["done"] = run.steps_done >= until
    return figures


def _stability_facts(found: Stability) -> dict[str, Any]:
    return {"rise": found.rise, "fall": found.fall, "low": found.low, "stable": found.stable}


def _failure(spec: Spec) -> dict[str, Any] | None:
    if not spec.failed:
        return None
    facts: dict[str, Any] = json.loads(spec.failure.read_bytes())
    return facts


def _values(run: Run, name: str) -> Floats:
    return run.series[name].values if name in run.series else np.array([np.nan])


def _mean(run: Run, name: str) -> float | None:
    """Over the steps that log it; None for none, and where one is broken: the mean of the rest would hide it."""
    values = _values(run, name)
    return None if np.isnan(values).any() else float(values.mean())


def _most(run: Run, name: str) -> float | None:
    values = _values(run, name)
    return None if np.isnan(values).any() else float(values.max())


def _seconds(spec: Spec) -> dict[str, float | None]:
    """Wall clock of a run's steps and of its evaluation, on a device that it shares with the runs beside it."""
    lines = timings(spec.run_dir) if spec.trains else []
    scores = scores_of(spec)
    return {
        "training": sum(map(step_time, lines)),
        "rollout": sum(line.get("rollout_seconds", 0.0) for line in lines),
        "step": float(np.median([step_time(line) for line in lines])) if lines else None,
        "evaluation": scores["seconds"] if scores else None,
    }


def _rewards(spec: Spec) -> dict[str, Floats] | None:
    """Rewards f64 [P, n] by FORMS; None before the run is evaluated."""
    scores = scores_of(spec)
    if scores is None:
        return None
    of_form = {form: np.array(rewards, dtype=np.float64) for form, rewards in scores["forms"].items()}
    return {OWN: of_form[spec.form], FP4: of_form[FP4], CONTROL: of_form[CONTROL]}


def _scored(specs: list[Spec]) -> dict[int, dict[str, Floats]]:
    """By seed, of the runs that are evaluated."""
    return {spec.seed: found for spec in specs if (found := _rewards(spec))}


# Over seeds


def _over_seeds(
    specs: list[Spec], runs: dict[int, dict[str, Any]], rewards: dict[int, dict[str, Floats]]
) -> dict[str, Any]:
    """A figure is {"mean", "se", "per_seed"} over the seeds that have it, or None."""
    figures: dict[str, Any] = {}
    for name in ("diff_mean", "diff_max", "code_before", "code_after", "reward_first", "reward_last", "bytes"):
        known = [run[name] for run in runs.values() if run[name] is not None]
        figures[name] = mean_and_error(known) if known else None
    worst = [run["diff_max"] for run in runs.values() if run["diff_max"] is not None]
    figures["diff_max_over_seeds"] = max(worst) if worst else None
    figures["scores"] = {form: score([r[form] for r in rewards.values()]) if rewards else None for form in FORMS}
    figures["form"] = specs[0].form if specs else None
    figures["collapse"] = [run["collapse"] for run in runs.values()]
    figures["stopped"] = {str(seed): run["stopped"] for seed, run in runs.items() if run["stopped"]}
    figures["done"] = sum(run["done"] for run in runs.values())
    figures["planned"] = len(runs)
    figures["steps"] = [run["steps"] for run in runs.values()]
    figures["seconds"] = [run["seconds"]["training"] + (run["seconds"]["evaluation"] or 0) for run in runs.values()]
    return figures


def control(runs: dict[int, dict[str, Any]] | None) -> dict[str, Any]:
    """Whether the table can be read: {"stable": True, False, or None while it cannot be told, "why"}."""
    if runs is None:
        return {"stable": None, "why": f"without {CONTROL} there is no control"}
    reasons = []
    for seed, run in runs.items():
        found = run.get("control")
        if run["stopped"]:
            reasons.append(f"seed {seed} stopped in step {run['stopped']['step']}")
        elif found and found["fall"] is not None:
            reasons.append(f"seed {seed} fell below {HOLD:g} in step {found['fall']} (lowest {found['low']:.2f})")
        elif found and found["rise"] is None and run["done"]:
            reasons.append(f"seed {seed} never rose to {HOLD:g}")
    if reasons:
        return {"stable": False, "why": "; ".join(reasons)}
    if not all(run["done"] for run in runs.values()):
        return {"stable": None, "why": f"{CONTROL} has not finished"}
    return {"stable": True, "why": f"{CONTROL} stays at {HOLD:g} or above after its rise, in every seed"}


def _differences(rewards: dict[str, dict[int, dict[str, Floats]]], form: str) -> dict[str, dict[str, Any]]:
    """ours - theirs of every pair, over the seeds that both have."""
    out: dict[str, dict[str, Any]] = {}
    for name, ours in rewards.items():
        out[name] = {}
        for other, theirs in rewards.items():
            seeds = [seed for seed in ours if seed in theirs]
            if seeds and name != other:
                pair = difference([ours[s][form] for s in seeds], [theirs[s][form] for s in seeds])
                out[name][other] = pair | {"seeds": seeds}
    return out


def _invocations(path: Path) -> list[dict[str, Any]]:
    """Those whose line is whole: one that a power failure cut off costs its device time, and no table."""
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            facts = json.loads(line)
            found.append(facts | {"seconds": float(facts["seconds"]), "jobs": int(facts["jobs"])})
        except (ValueError, TypeError, KeyError):
            warn(f"{path} has a broken line: the device time of that invocation is not counted")
    return found
