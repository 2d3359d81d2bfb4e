"""Under which settings a control is stable: short runs under variants of a rung's recipe, side by side, a line each.

A variant is a set of overrides; one that touches [task] or [start] gets a warm start of its own. Runs are those of a
comparison, without its evaluation: they stop in time, go on with the same command, and lie in
<out>/<variant>/<mode>/seed<k>/. Warm starts lie beside the folder, where the comparison itself finds them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tracefp4.config import ConfigError
from tracefp4.methods import list_methods
from tracefp4.report import ensure_dir, provenance, write_json_atomic
from tracefp4.report.logger import METRICS
from tracefp4.report.runs import Run, load_run
from tracefp4.reproduce.experiments import CONTROL, Arm, Experiment, Table
from tracefp4.reproduce.plan import (
    RECIPES,
    Plan,
    Request,
    Spec,
    canonical,
    check_overrides,
    check_vacant,
    device_settings,
    make_config,
    warm_start,
    write_recipe,
)
from tracefp4.reproduce.runner import STARTED, step_time, timings
from tracefp4.reproduce.stats import Floats, collapse_step, stability

SEARCH = "search.json"
WINDOW = 10
"""Steps that a reward of the summary is the mean of; of shorter runs a tenth."""


@dataclass(frozen=True)
class Variant:
    """E.g. ``Variant("lr=1e-4 tis_cap=2", ("train.lr=1e-4", "train.tis_cap=2"))``."""

    label: str
    settings: tuple[str, ...]

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label)


def make_variants(vary: Sequence[str]) -> list[Variant]:
    """Every combination of one alternative of each entry; one variant without overrides for no entry.

    An entry is "KEY=A,B,C", or alternatives of several keys: "KEY=A KEY2=B; KEY=C KEY2=D".

    Raises:
        ConfigError: an entry sets nothing, or two variants would be the same.
    """
    axes = [_alternatives(entry) for entry in vary]
    keys = [{setting.partition("=")[0] for choice in axis for setting in choice} for axis in axes]
    if both := next((a & b for a, b in itertools.combinations(keys, 2) if a & b), None):
        raise ConfigError(f"two --vary set {min(both)}: give all of its values in one")
    found = [tuple(itertools.chain(*choice)) for choice in itertools.product(*axes)]
    variants = [Variant(_label(settings), settings) for settings in found]
    folders = [variant.folder for variant in variants]
    if twice := next((f for f in folders if folders.count(f) > 1), None):
        raise ConfigError(f"--vary names the variant {twice} twice")
    return variants


def _alternatives(entry: str) -> list[tuple[str, ...]]:
    if ";" not in entry and " " not in entry.strip():
        key, equals, values = entry.strip().partition("=")
        found: list[tuple[str, ...]] = [(f"{key}={value.strip()}",) for value in values.split(",") if value.strip()]
        complete = bool(key and equals and found)
    else:
        found = [tuple(part.split()) for part in entry.split(";") if part.strip()]
        complete = bool(found) and all("=" in setting for part in found for setting in part)
    if not complete:
        raise ConfigError(f"--vary takes KEY=A,B or 'KEY=A KEY2=B; KEY=C KEY2=D', got '{entry}'")
    return found


def _label(settings: Sequence[str]) -> str:
    return (
        " ".join(
            setting.rpartition("=")[0].rpartition(".")[2] + "=" + setting.rpartition("=")[2] for setting in settings
        )
        or "recipe"
    )


def make_search(
    rung_name: str,
    variants: Sequence[Variant],
    out: Path,
    *,
    modes: Sequence[str] = (CONTROL,),
    seeds: Sequence[int] = (0,),
    steps: int = 100,
    settings: Sequence[str] = (),
    tiny: bool = False,
    device: str = "auto",
) -> Plan:
    """The runs of a search: a table a variant, an arm a mode. Touches no file.

    Raises:
        ConfigError: a mode or an override is unknown or contradicts an option, or the device is not there.
    """
    known = [m.name for m in list_methods()]
    if unknown := next((mode for mode in modes if mode.partition("@")[0] not in known), None):
        raise ConfigError(f"--modes: there is no mode {unknown!r} (tracefp4 methods lists them)")
    request = Request("search", rung_name, tuple(modes), tuple(seeds), steps, tiny, device, tuple(settings))
    chosen, on_device = device_settings(device)
    tables, specs, starts = [], [], {}
    for variant in variants:
        arms = tuple(Arm(mode) for mode in modes)
        table = Table(variant.folder, variant.label, arms, variant.settings)
        check_overrides((*settings, *variant.settings), ())
        rung, start = warm_start(rung_name, out, tiny, (*settings, *variant.settings))
        starts[start] = rung
        tables.append(table)
        for arm in arms:
            of_run = (f"run.steps={steps}", *on_device)
            config = make_config(rung.recipe(str(start)), table, arm, of_run)
            specs += [
                Spec(out, table, arm, seed, steps, of_run, arm.mode, (), None, start, canonical(config, seed))
                for seed in seeds
            ]
    summary = "which settings keep a control stable"
    experiment = Experiment("search", summary, tuple(tables), steps, tuple(seeds))
    specs.sort(key=lambda spec: spec.seed)
    return Plan(out, experiment, request, tuple(seeds), steps, chosen, tuple(specs), starts)


def open_search(plan: Plan) -> None:
    """Writes the recipes and what was asked for into a folder that the caller has locked; variants may join later."""
    check_vacant(plan.out, SEARCH)
    ensure_dir(plan.out / RECIPES)
    for table in plan.experiment.tables:  # variants that share a start differ in what comes after it
        settings = (*plan.request.settings, *table.settings)
        rung, start = warm_start(plan.request.recipe or "", plan.out, plan.request.tiny, settings)
        write_recipe(plan, table, rung.recipe(str(start)))
    variants = {table.key: list(table.settings) for table in plan.experiment.tables}
    write_json_atomic(plan.out / SEARCH, provenance() | asdict(plan.request) | {"variants": variants})


# What came of it


def marks(steps: int) -> tuple[int, int, int]:
    """The steps at which the summary states a reward: a quarter, half, all."""
    return max(1, steps // 4), max(1, steps // 2), steps


def headings(steps: int) -> list[str]:
    at = [f"@{mark}" for mark in marks(steps)]
    ranges = ["length", "entropy", "|log p diff.|", "grad norm", "clipped"]
    return ["variant", "mode", "steps", "start", "first", *at, "lowest after .8", *ranges, "s a step (rollout, train)"]


def summary_rows(plan: Plan) -> list[list[str]]:
    """A row a run, by the headings; of an unfinished run what there is."""
    return [summary_row(spec, plan.steps) for spec in plan.specs]


def summary_row(spec: Spec, steps: int) -> list[str]:
    mode = spec.arm.mode if spec.seed == 0 else f"{spec.arm.mode}, seed {spec.seed}"
    row = [spec.table.title, mode]
    path = spec.run_dir / METRICS
    if not path.is_file() or not path.stat().st_size:
        return [*row, "0", _start_score(spec.start), *["-"] * (len(headings(steps)) - 4)]
    run = load_run(spec.run_dir)
    rewards = _values(run, "reward/mean")
    width = max(1, min(WINDOW, steps // 10))
    at = [_two(rewards[mark - width : mark].mean()) if len(rewards) >= mark else "-" for mark in marks(steps)]
    return [
        *row,
        f"{len(rewards)}" + (", stopped" if spec.failed else ""),
        _start_score(spec.start),
        _two(rewards[:width].mean()),
        *at,
        _lowest(rewards),
        _from_to(run, "response/length_mean", width, ".0f"),
        _from_to(run, "train/entropy", width, ".3f"),
        _from_to(run, "mismatch/logprob_abs_diff_mean", width, ".2g"),
        _from_to(run, "train/grad_norm", width, ".2g"),
        _from_to(run, "train/clip_frac", width, ".2%"),
        _step_seconds(spec),
    ]


def _start_score(start: Path) -> str:
    """Of the warm start by its own measurement."""
    try:
        return _two(json.loads((start / STARTED).read_bytes())["pass_rate"]["value"])
    except (OSError, ValueError, KeyError):
        return "-"


def _lowest(rewards: Floats) -> str:
    """The smoothed reward's lowest value after its rise to .8, or how far it came; a collapse is named."""
    found, fallen = stability(rewards), collapse_step(rewards)
    text = f"{_two(found.low)} from {found.rise}" if found.low is not None else "not reached"
    return text if fallen is None else f"{text}, collapsed at {fallen}"


def _from_to(run: Run, name: str, width: int, form: str) -> str:
    values = _values(run, name)
    if not len(values):
        return "-"
    return f"{values[:width].mean():{form}} > {values[-width:].mean():{form}}"


def _step_seconds(spec: Spec) -> str:
    lines = timings(spec.run_dir)
    if not lines:
        return "-"
    parts = [np.median([line.get(f"{name}_seconds", 0.0) for line in lines]) for name in ("rollout", "train")]
    return f"{np.median([step_time(line) for line in lines]):.2f} ({parts[0]:.2f}, {parts[1]:.2f})"


def _values(run: Run, name: str) -> Floats:
    """NaN where the log says null."""
    return run.series[name].values if name in run.series else np.array([])


def _two(value: Any) -> str:
    """Two digits behind the point, none before it where that is a zero: .50, -.50, 10.00."""
    return "-" if value is None else re.sub(r"^(-?)0\.", r"\1.", f"{float(value):.2f}")
