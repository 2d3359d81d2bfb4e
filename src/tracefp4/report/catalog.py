"""What a report plots: every metric, what it is, its unit, and why a run may lack it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tracefp4.report.runs import TIMING_PREFIX, Run

NOT_QUANTIZED = frozenset({"bf16", "fp32", "ptq:nvfp4", "ptq:4over6", "ptq:hscale"})
"""Methods whose rollout is not in FP4 (tracefp4.methods, which is not imported: it takes torch along)."""
NOT_ROUNDED = frozenset({"naive", "quads", "w4a16"})
"""Quantized methods whose trainer does not round activations and KV, so that nothing is "after"."""
NOT_GUIDED = frozenset(
    {"naive", "qat", "qarl", "quads", "quads-kv", "resq", "score_centering", "triage", "w4a16", "w4a16-kv"}
)
"""Quantized methods that record nothing."""

ALIASES = frozenset(
    {"rollout_corr/kl", "rollout_corr/k3_kl", "train_rollout_logprob_abs_diff", "token_mult_prob_error"}
)
"""The same figures under the names of other frameworks."""

LAYER = re.compile(r"^(?P<rate>.+)/(?P<site>[^/]+)/layer(?P<layer>\d+)$")
"""`code_mismatch/before/key/layer3`, see tracefp4.nn.observe."""
PASS_RATE = "eval/pass_rate"


@dataclass(frozen=True)
class Plot:
    """log: the value axis; zero: it starts at 0; share: it ends at 1 at most; x: what the horizontal axis is; pair:
    plots of one pair have one value axis."""

    metric: str
    title: str
    unit: str
    log: bool = False
    zero: bool = True
    share: bool = False
    x: str = "step"
    pair: str = ""

    @property
    def key(self) -> str:
        """For ids and file names: letters, digits, `_`, `-`; differs where the metric does."""
        plain = re.sub(r"[^A-Za-z0-9_]", "-", self.metric)[:80]
        if re.fullmatch(r"[A-Za-z0-9_/]{1,80}", self.metric):
            return plain
        return f"{plain}-{hashlib.sha256(self.metric.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Section:
    """A heading, what its plots tell, and the plots. key: its id."""

    key: str
    title: str
    text: str
    plots: tuple[Plot, ...]


_TIME = TIMING_PREFIX
SECTIONS = (
    Section(
        "learning",
        "Learning",
        "Whether the policy gets better, and whether it still explores.",
        (
            Plot("reward/mean", "Reward, mean", "of a step's responses"),
            Plot(PASS_RATE, "Held-out pass rate", "share of problems", share=True, x="steps done"),
            Plot("train/entropy", "Entropy of the policy", "nats per token"),
            Plot("response/length_mean", "Response length, mean", "tokens"),
            Plot("response/length_max", "Response length, longest", "tokens"),
            Plot("response/truncated_share", "Truncated responses", "share cut off at the limit"),
            Plot("train/no_advantage_share", "Responses that teach nothing", "share in groups of equal reward"),
        ),
    ),
    Section(
        "mismatch",
        "Distance between trainer and rollout",
        "On the tokens the rollout sampled, under the weights it had. The first figure is the one to watch.",
        (
            Plot("mismatch/logprob_abs_diff_mean", "|log-prob difference|, mean", "nats, log axis", log=True),
            Plot("mismatch/logprob_abs_diff_max", "|log-prob difference|, largest", "nats, log axis", log=True),
            Plot("mismatch/kl_k3", "KL(rollout || trainer), k3", "nats, log axis", log=True),
            Plot("mismatch/extreme_token_frac", "Tokens off by more than 2x", "share of tokens"),
            Plot("mismatch/extreme_tokens_max", "The most of them in one response", "tokens"),
            Plot("tis/clip_frac", "Importance weights over the cap", "share of tokens"),
            Plot("tis/max_untruncated", "Largest importance weight", "before the cap, log axis", log=True),
            Plot("tis/ess_untruncated", "Effective sample size", "share, before the cap", zero=False, share=True),
            Plot("router/topk_disagreement", "Router disagreement", "share of rows with other experts"),
        ),
    ),
    Section(
        "codes",
        "FP4 codes that differ",
        "Share of FP4 values whose slot differs from the rollout's, on probed responses: with the trainer rounding to "
        "nearest (before), and as its forward rounds (after guidance, where there is any).",
        (
            Plot(
                "code_mismatch/before", "Codes that differ, before", "share of values, nearest rounding", pair="codes"
            ),
            Plot("code_mismatch/after", "Codes that differ, after", "share of values, as used", pair="codes"),
            Plot("scale_mismatch/before", "Scales that differ, before", "share of blocks", pair="scales"),
            Plot("scale_mismatch/after", "Scales that differ, after", "share of blocks", pair="scales"),
        ),
    ),
    Section(
        "guidance",
        "Guidance",
        "Rows whose rounding the rollout's record decided; the others fell back to nearest rounding.",
        (
            Plot("guidance/guided_share", "Guided rows", "share", zero=False, share=True),
            Plot("guidance/bytes_per_token", "Guidance stored", "bytes per token"),
            Plot("router/replayed_share", "Rows with replayed routing", "share", zero=False, share=True),
        ),
    ),
    Section(
        "optimization",
        "Optimization",
        "",
        (
            Plot("train/clip_frac", "Clipped tokens", "share of tokens outside the ratio's band"),
            Plot("train/ratio_mean", "Policy ratio, mean", "new over old", zero=False),
            Plot("train/grad_norm", "Gradient norm", "before clipping, log axis", log=True),
            Plot("train/loss", "Policy loss", "per token", zero=False),
            Plot("policy/lag", "Staleness", "versions the rollout is behind"),
        ),
    ),
    Section(
        "timing",
        "Time",
        "Wall clock. FP4 is emulated unless the hardware has it: the emulation's speed says nothing of FP4's.",
        (
            Plot(f"{_TIME}rollout_seconds", "Rollout", "seconds per step"),
            Plot(f"{_TIME}train_seconds", "Training", "seconds per step"),
            Plot(f"{_TIME}weight_sync_seconds", "Weight sync", "seconds per step"),
            Plot(f"{_TIME}rollout_tokens_per_second", "Rollout throughput", "response tokens per second"),
            Plot(f"{_TIME}train_tokens_per_second", "Training throughput", "taught tokens per second"),
            Plot("rollout/preemptions", "Preempted sequences", "per step"),
            Plot("rollout/shared_rows", "Prompt tokens that another sequence had computed", "per step"),
        ),
    ),
)

FALLBACK = "guidance/fallback/"
_NEVER_PLOTTED = ALIASES | {
    "guidance/rows",
    "guidance/guided_rows",
    "mismatch/kl_k1",
    "mismatch/mult_prob_error",
    "tis/mean",
    "tis/max",
    "tis/ess",
}
"""Aliases, and figures that a plotted one already tells."""


def fallback_plots(metrics: Iterable[str]) -> list[Plot]:
    """One plot a reason."""
    reasons = sorted(name.removeprefix(FALLBACK) for name in metrics if name.startswith(FALLBACK))
    return [Plot(FALLBACK + reason, f"Fallback: {reason}", "rows per step") for reason in reasons]


def layer_plots(metrics: Iterable[str]) -> list[Plot]:
    """`code_mismatch/{before,after}/<site>`: one plot a site and rate, over layers."""
    found = {(m["site"], m["rate"]) for m in map(LAYER.match, metrics) if m and m["rate"].startswith("code_mismatch/")}
    kept = [(site, rate) for site, rate in found if rate.rpartition("/")[2] in ("before", "after")]
    ordered = sorted(kept, key=lambda pair: (pair[0], pair[1].endswith("after")))
    return [
        Plot(
            f"{rate}/{site}",
            f"{site.replace('_', ' ').capitalize()} codes by layer, {rate.rpartition('/')[2]}",
            "share of values, last quarter of probed steps",
            x="layer",
            pair=site,
        )
        for site, rate in ordered
    ]


def other_plots(metrics: Iterable[str]) -> list[Plot]:
    """Metrics this file does not know: plotted plainly."""
    known = {plot.metric for section in SECTIONS for plot in section.plots} | _NEVER_PLOTTED
    observed = ("code_mismatch/", "scale_mismatch/", "d_act/")
    unknown = (m for m in sorted(metrics) if m not in known and not LAYER.match(m) and not m.startswith(FALLBACK))
    return [Plot(m, m, "as logged", zero=False) for m in unknown if not m.startswith(observed)]


def why_absent(metric: str, run: Run) -> str:
    """The reason a run lacks a metric, as a clause: 'the rollout is not quantized'."""
    method = run.method.partition("@")[0]  # what follows an @ names formats
    if metric.startswith(TIMING_PREFIX):
        return "not in timing.jsonl"
    if metric == PASS_RATE:
        if run.setting("run.eval_prompts") == 0:
            return "run.eval_prompts is 0"
        return "no pass rate in final.json" if run.final else "no final.json yet, which ends a run"
    if metric.startswith(("code_mismatch/", "scale_mismatch/", "d_act/", "guidance/")):
        if method in NOT_QUANTIZED:
            return "the rollout is not quantized"
        if metric.startswith("guidance/") and method in NOT_GUIDED:
            return "no guidance is recorded"
        if "/after" in metric and method in NOT_ROUNDED:
            return "the trainer does not round"
        probes = ("run.probe_every", "run.probe_trajectories") if not metric.startswith("guidance/") else ()
        for key in probes:
            if run.setting(key) == 0:
                return f"{key} is 0, so that no response is probed"
    return "not in metrics.jsonl"


def reasons_absent(metric: str, lacking: Sequence[Run], runs: Sequence[Run]) -> str:
    """'the rollout is not quantized (bf16, fp32); no guidance is recorded (qat)'; seeds where others have it."""
    has_it = {run.method for run in runs if not any(run is other for other in lacking)}
    names: dict[str, dict[str, None]] = {}
    for run in lacking:
        name = f"{run.method} seed {run.seed}" if run.method in has_it else run.method
        names.setdefault(why_absent(metric, run), {})[name] = None
    return "; ".join(f"{reason} ({', '.join(who)})" for reason, who in names.items())
