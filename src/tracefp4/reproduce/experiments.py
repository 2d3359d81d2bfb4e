"""What each command compares. An arm is a row of a table: a mode, and settings in which it differs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tracefp4.config import ConfigError, did_you_mean

CONTROL = "bf16"
LADDER = ("ladder-6", "ladder-12", "ladder-24")


@dataclass(frozen=True)
class Arm:
    """A row, e.g. ``Arm("trace-all", "1.5 bits", ("method.bits=1.5",))``.

    mode: of ``tracefp4 methods``. label: "" for the mode's name. settings: overrides of its training. policy_of: label
    of the arm whose trained policy is evaluated; such an arm trains none. evaluated: overrides of its evaluation.
    """

    mode: str
    label: str = ""
    settings: tuple[str, ...] = ()
    policy_of: str = ""
    evaluated: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.label or self.mode

    @property
    def folder(self) -> str:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.name)


@dataclass(frozen=True)
class Table:
    """Arms that share a start, a recipe and seeds. rung: a recipe of the ladder, "" for that of the command; settings:
    overrides of all arms; note: what a reader must know of its rows."""

    key: str
    title: str
    arms: tuple[Arm, ...]
    settings: tuple[str, ...] = ()
    rung: str = ""
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """A command. steps, seeds: those of the full profile, unless told."""

    name: str
    summary: str
    tables: tuple[Table, ...]
    steps: int = 400
    seeds: tuple[int, ...] = (0, 1, 2)


def _arms(names: str) -> tuple[Arm, ...]:
    return tuple(Arm(name) for name in names.split())


_DECOUPLED = ("train.old_logprob=recompute", "train.tis_cap=5")
_BYPASS = ("train.old_logprob=bypass",)

_MAIN_NOTE = (
    "trace guides the deeper half of the layers with 1.125 bits a value, trace-paper the same half as the paper does "
    "(1.5 bits, bracket rule), trace-all every layer. quads leaves the KV cache out of the trainer, as published; "
    "quads-kv rounds it there too."
)
_OTHERS_NOTE = "'qarl, wide band' is qarl with a band four times as wide, since the paper's epsilons are not known."
_WIDE_BAND = ("train.tbpo.eps_low=1.2e-3", "train.tbpo.eps_high=1.6e-3")

_MAIN = Experiment(
    "main",
    "every method from one start, decoupled and bypass form of the objective",
    (
        Table(
            "decoupled",
            "Old log-probs recomputed by the trainer, importance weights capped at 5",
            _arms("bf16 naive qat qarl quads quads-kv trace trace-paper trace-all"),
            _DECOUPLED,
            note=_MAIN_NOTE,
        ),
        Table(
            "bypass",
            "Ratio and clip against the rollout's log-probs",
            _arms("bf16 naive qat quads quads-kv trace trace-paper trace-all"),
            _BYPASS,
            note=_MAIN_NOTE,
        ),
    ),
)

_DYNAMICS = Experiment(
    "dynamics",
    "curves of all methods, the less common ones included",
    (
        Table(
            "dynamics",
            "Old log-probs recomputed by the trainer, importance weights capped at 5",
            (
                *_arms("bf16 naive qat qarl"),
                Arm("qarl", "qarl, wide band", _WIDE_BAND),
                *_arms("quads resq score_centering triage w4a16 w4a16-kv trace trace-all"),
            ),
            _DECOUPLED,
            note=_OTHERS_NOTE,
        ),
    ),
    steps=150,
    seeds=(0,),
)


def _bits(bits: str) -> Arm:
    own = bits == "1.125"  # the mode's: the run is that of the mode itself, in this table and in others
    return Arm("trace-all", f"{bits} bits", () if own else (f"method.bits={bits}",))


_BITS = Experiment(
    "bits",
    "how many bits of guidance a value needs, and what the rest of the method is good for",
    (
        Table(
            "bits",
            "Guidance in all layers; 0.5 and 0.125 bits record block scales only",
            (*_arms("bf16 qat"), *map(_bits, ("4.5", "1.5", "1.125", "1.0625", "0.5", "0.125"))),
            _DECOUPLED,
        ),
        Table(
            "parts",
            "Guidance in all layers, one part changed",
            (
                *_arms("bf16 trace-all"),
                Arm("trace-all", "bracket rule", ("method.bits=1.5", "method.rule=bracket")),
                Arm("trace-all", "guided first update", ("train.guided_updates=1",)),
                Arm("trace-all", "clipped gradient", ("train.straight_through=clipped",)),
                Arm("trace-all", "no cap", ("train.tis_cap=1e6",)),
                Arm("trace-all", "no replay", ("train.replay=false",)),
                Arm("bf16", "bf16 no replay", ("train.replay=false",)),
            ),
            _DECOUPLED,
        ),
    ),
    steps=200,
)

_GUIDED = ("all", "deeper-half", "deeper-quarter", "deeper-eighth")
_LAYERS = Experiment(
    "layers",
    "what guiding a half, a quarter or an eighth of the layers costs at 6, 12 and 24 layers",
    tuple(
        Table(
            f"layers-{rung.rpartition('-')[2]}",
            f"{rung.rpartition('-')[2]} layers, 1.125 bits",
            (*_arms("bf16 naive qat"), *(Arm("trace-all", where, (f"method.layers={where}",)) for where in _GUIDED)),
            _DECOUPLED,
            rung,
        )
        for rung in LADDER
    ),
    steps=150,
)


def _mx(key: str, title: str, activations: str) -> Table:
    # By [quant], not by a preset of the mode: the form "fp4" of the evaluation follows it.
    formats = ("quant.weights=mxfp4-rceil", f"quant.activations={activations}", "quant.kv=mxfp4-rceil")
    return Table(key, title, _arms("bf16 naive qat trace-all"), (*_DECOUPLED, *formats))


_MXFP4 = Experiment(
    "mxfp4",
    "MXFP4 in place of NVFP4, with 8-bit and with 4-bit activations",
    (
        _mx("w4a8", "MXFP4 weights and KV cache, MXFP8 activations", "mxfp8-rceil"),
        _mx("w4a4", "MXFP4 weights, activations and KV cache", "mxfp4-rceil"),
    ),
    steps=200,
)


def _ptq(name: str, format_name: str, *more: str) -> Arm:
    formats = (f"quant.weights={format_name}", f"quant.activations={format_name}", "quant.kv=nvfp4")
    return Arm("bf16", name, policy_of="bf16", evaluated=(*formats, *more))


_PTQ = Experiment(
    "ptq",
    "training in FP4 against training in BF16 and quantizing afterwards",
    (
        Table(
            "ptq",
            "Evaluated in FP4",
            (
                Arm("bf16"),
                _ptq("ptq:nvfp4", "nvfp4"),
                _ptq("ptq:4over6", "nvfp4-4over6", "quant.encode_scale=row"),
                Arm("ptq:hscale", policy_of="bf16"),
                *_arms("qat trace trace-all"),
            ),
            _DECOUPLED,
            note="ptq:4over6 takes encode scales as they come, as its authors do; all other rows round them down to a "
            "power of two.",
        ),
    ),
)

_PINNED = (Arm("trace-all", "trace-all no band", ("method.band=none",)),)
_STALE_NOTE = (
    "'trace-all no band' follows every record wherever the trainer's value lies, as published; trace-all follows those "
    "of older weights only near a rounding border."
)

_STALENESS = Experiment(
    "staleness",
    "rollouts that are 0 to 3 policy versions old",
    tuple(
        Table(
            f"lag-{lag}",
            f"Rollouts {lag} version{'s' if lag > 1 else ''} old" if lag else "Rollouts of the newest policy",
            (*_arms("bf16 naive qat trace-all"), *(_PINNED if lag else ())),
            (*_DECOUPLED, f"run.lag={lag}") if lag else _DECOUPLED,
            note=_STALE_NOTE if lag else "",
        )
        for lag in range(4)
    ),
    steps=200,
)

EXPERIMENTS = {e.name: e for e in (_MAIN, _DYNAMICS, _BITS, _LAYERS, _MXFP4, _PTQ, _STALENESS)}


def chosen(experiment: Experiment, names: Sequence[str], modes: Sequence[str]) -> Experiment:
    """The experiment with the arms of these names only, by label or mode; a mode that no table has joins all of them.

    modes: those that are registered; NAME@FORMATS is NAME in other formats.

    Raises:
        ConfigError: a name is neither, or the mode of an arm is missing.
    """
    if len(set(names)) < len(names):
        raise ConfigError(f"--modes names {next(n for n in names if list(names).count(n) > 1)} twice")
    here = {name for table in experiment.tables for arm in table.arms for name in (arm.name, arm.mode)}
    for name in names:
        if name not in here and _base(name) not in modes:
            raise ConfigError(f"--modes: there is no mode {name!r}{did_you_mean(name, sorted({*here, *modes}))}")
    tables = experiment.tables
    if names:
        added = tuple(Arm(name) for name in names if name not in here)
        tables = tuple(replace(t, arms=(*_selected(t, names), *added)) for t in tables)
        tables = tuple(t for t in tables if t.arms)
    missing = sorted({_base(arm.mode) for t in tables for arm in t.arms} - set(modes))
    if missing:
        raise ConfigError(
            f"reproduce {experiment.name} compares {', '.join(missing)}, which this version does not have: name others "
            "with --modes (tracefp4 methods lists them)"
        )
    return replace(experiment, tables=tables)


def on_rung(experiment: Experiment, rung: str | None) -> Experiment:
    """Of an experiment that climbs the ladder itself, the tables of this rung; any other as it is.

    Raises:
        ConfigError: it climbs, and no table is of this rung.
    """
    climbs = [table.rung for table in experiment.tables if table.rung]
    if rung is None or not climbs:
        return experiment
    if rung not in climbs:
        raise ConfigError(
            f"reproduce {experiment.name} climbs the ladder itself: --recipe is one of {', '.join(climbs)}"
        )
    return replace(experiment, tables=tuple(table for table in experiment.tables if table.rung == rung))


def _base(mode: str) -> str:
    return mode.partition("@")[0]


def _selected(table: Table, names: Sequence[str]) -> tuple[Arm, ...]:
    """The arms of these labels, all of a mode where no label is its name, and arms whose policy those evaluate."""
    labels = {arm.name for arm in table.arms}
    arms = [arm for arm in table.arms if arm.name in names or (arm.mode in names and arm.mode not in labels)]
    wanted = {arm.name for arm in arms} | {arm.policy_of for arm in arms}
    return tuple(arm for arm in table.arms if arm.name in wanted)
