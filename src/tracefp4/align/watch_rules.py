"""The rules of the watchdogs: one class each, with the sentence it says.

A rule sees every step that carries the metrics it ``needs`` and answers with a Finding or None; ``watchdog`` adds
patience and cool-down. A message is: what was seen, what it usually means, what to do, with keys as the user writes
them and their current values.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from tracefp4.align.watch_remedies import FALLBACKS, mismatch_remedy, no_advantage_remedy

if TYPE_CHECKING:
    from tracefp4.align.watchdog import WatchConfig

MISMATCH = "mismatch/logprob_abs_diff_mean"
NEGLIGIBLE = 1e-5
"""A mean log-prob difference below this (two engines in FP32 are at 1e-7) is rounding, whatever its trend."""

GRAD_WINDOW = 50
DRIFT_Z = 4.0
"""Kendall's test of a trend, in standard deviations of independent noise; consecutive steps are not quite that."""


@dataclass(frozen=True)
class Seen:
    """One step: its finite metrics, and the names of the others, sorted."""

    step: int
    values: dict[str, float]
    broken: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A condition holds. severity: grows as it gets worse; what "much worse" compares."""

    severity: float
    message: str
    figures: dict[str, float] = field(default_factory=dict)


class Rule:
    """config: thresholds. settings: the resolved run config, nested by section, for messages only."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        self.config, self._settings = config, settings

    @property
    def patience(self) -> int:
        return self.config.patience

    @property
    def lasting(self) -> str:
        """How long the condition has held when it is reported, as part of a sentence."""
        return f" for {self.patience} or more steps in a row" if self.patience > 1 else ""

    def look(self, seen: Seen) -> Finding | None:
        raise NotImplementedError

    def key(self, name: str) -> str:
        """ "train.lr (now 5e-05)", or the name alone where the settings lack it."""
        value = self.setting(name)
        return name if value is None else f"{name} (now {value})"

    def setting(self, name: str) -> Any:
        section, _, leaf = name.partition(".")
        return self._settings.get(section, {}).get(leaf)


class _Start:
    """A run's own start: the median of a figure over its first n steps.

    Values that were an alarm themselves are left out: a run that breaks at its third step would else be compared with
    its broken self. It takes two values to have a start, as one may be an outlier that makes all later ones alarms.
    """

    def __init__(self, n: int) -> None:
        self._n, self._left, self._kept = n, n, list[float]()

    @property
    def value(self) -> float | None:
        return statistics.median(self._kept) if len(self._kept) >= min(2, self._n) else None

    def add(self, value: float, alarm: bool) -> None:
        if self._left and not alarm:
            self._kept.append(value)
        self._left = max(0, self._left - 1)


class _FromStart(Rule):
    """A rule that compares a figure with the run's own start."""

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._start = _Start(config.baseline_steps)


def trend(steps: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """(slope per step, fitted value at the last step, z) of a series, robust to outliers.

    The slope is Theil and Sen's: the median over all pairs. z is Kendall's statistic, free of scale.
    """
    x, y = np.asarray(steps, float), np.asarray(values, float)
    i, j = np.triu_indices(len(y), 1)
    rise = y[j] - y[i]
    slope = float(np.median(rise / (x[j] - x[i])))
    last = float(np.median(y - slope * (x - x[-1])))
    n = len(y)
    return slope, last, float(np.sign(rise).sum() / np.sqrt(n * (n - 1) * (2 * n + 5) / 18))


class NonFinite(Rule):
    name = "nonfinite"

    @property
    def patience(self) -> int:
        return 1

    def look(self, seen: Seen) -> Finding | None:
        if not seen.broken:
            return None
        more = len(seen.broken) - 1
        what = seen.broken[0] + (f" and {more} more metric{'s' if more > 1 else ''}" if more else "")
        return Finding(
            len(seen.broken),
            f"{what} {'are' if more else 'is'} NaN or infinite at step {seen.step}: logits or weights have overflowed, "
            f"and no later step can be trusted. Go back to an earlier state and lower {self.key('train.lr')} or "
            f"{self.key('train.grad_clip')}; a run with rollout.dtype=float32 and train.dtype=float32 tells overflow "
            "from a bug.",
            {"count": float(len(seen.broken))},
        )


class Mismatch(_FromStart):
    name = "mismatch"
    needs = (MISMATCH,)

    def look(self, seen: Seen) -> Finding | None:
        c, value = self.config, seen.values[MISMATCH]
        start = self._start.value
        alarm = _mismatch_alarm(value, start, c)
        self._start.add(value, alarm)
        figures = {"value": value}
        if start is not None and alarm:
            ratio = value / max(start, NEGLIGIBLE)
            figures |= {"start": start, "ratio": ratio}
            severity, what = ratio, f"{ratio:.3g} times this run's start ({start:.3g})"
        elif value > c.mismatch_limit:
            severity, what = value / c.mismatch_limit, f"above {c.mismatch_limit:g}, where training rarely lasts"
        else:
            return None
        return Finding(
            severity,
            f"{MISMATCH} is {value:.3g} at step {seen.step}, {what}{self.lasting}: trainer and rollout no longer give "
            "the same tokens the same probability. " + mismatch_remedy(self, seen),
            figures,
        )


def _mismatch_alarm(value: float, start: float | None, config: WatchConfig) -> bool:
    return start is not None and value > max(NEGLIGIBLE, config.mismatch_factor * start)


class MismatchDrift(_FromStart):
    """Warns before ``mismatch`` does, of a trend in the logarithm that would reach its limit within another window.

    All of: Kendall's z above DRIFT_Z; a fitted rise over the window of at least drift_growth; the fitted line
    reaches mismatch_factor times the start within drift_window more steps.
    """

    name = "mismatch_drift"
    needs = (MISMATCH,)

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._recent: deque[tuple[float, float]] = deque(maxlen=config.drift_window)

    def look(self, seen: Seen) -> Finding | None:
        c, value = self.config, seen.values[MISMATCH]
        start = self._start.value
        self._start.add(value, _mismatch_alarm(value, start, c))
        self._recent.append((seen.step, max(value, NEGLIGIBLE)))
        if start is None or len(self._recent) < c.drift_window:
            return None
        steps = [step for step, _ in self._recent]
        slope, last, z = trend(steps, [float(np.log(v)) for _, v in self._recent])
        span = steps[-1] - steps[0]
        growth = float(np.exp(slope * span))
        ahead = (float(np.log(c.mismatch_factor * max(start, NEGLIGIBLE))) - last) / slope if slope > 0 else np.inf
        if z < DRIFT_Z or growth < c.drift_growth or ahead > span:
            return None
        when = f"in about {ahead:.0f} steps" if ahead >= 1 else "now"
        return Finding(
            growth,
            f"{MISMATCH} has risen {growth:.2f}-fold over the {len(steps)} steps to step {seen.step} and passes "
            f"{c.mismatch_factor:g} times this run's start ({start:.3g}) {when}: the two policies drift apart slowly. "
            + mismatch_remedy(self, seen),
            {"growth": growth, "start": start, "fitted": float(np.exp(last)), "z": z},
        )


class MismatchMax(Rule):
    name = "mismatch_max"
    needs = ("mismatch/logprob_abs_diff_max",)

    def look(self, seen: Seen) -> Finding | None:
        value, limit = seen.values[self.needs[0]], self.config.mismatch_max_limit
        if value <= limit:
            return None
        return Finding(
            value,
            f"the largest log-prob difference of a single token is {value:.3g} at step {seen.step}, above "
            f"watch.mismatch_max_limit {limit:g}{self.lasting}: one path all but excludes a token that the other "
            "chose. " + mismatch_remedy(self, seen),
            {"value": value, "limit": limit},
        )


class EntropyCollapse(_FromStart):
    name = "entropy_collapse"
    needs = ("train/entropy",)

    def look(self, seen: Seen) -> Finding | None:
        value = seen.values["train/entropy"]
        start = self._start.value
        limit = max(self.config.entropy_floor, self.config.entropy_share * (start or 0.0))
        self._start.add(value, value < limit)
        if value >= limit:
            return None
        of_start = "" if start is None else f" ({value / start:.1%} of this run's start)" if start else ""
        return Finding(
            limit / max(value, 1e-12),
            f"train/entropy is {value:.3g} nats at step {seen.step}{of_start}, below {limit:.3g}{self.lasting}: "
            "the policy has stopped exploring, and groups of equal responses teach nothing. Raise "
            f"{self.key('train.clip_high')} or {self.key('sampling.temperature')}, or lower {self.key('train.lr')} "
            "and start from an earlier state.",
            {"value": value, "limit": limit},
        )


class EntropyExplosion(_FromStart):
    name = "entropy_explosion"
    needs = ("train/entropy",)

    def look(self, seen: Seen) -> Finding | None:
        value = seen.values["train/entropy"]
        start = self._start.value
        alarm = start is not None and value > max(self.config.entropy_floor, self.config.entropy_factor * start)
        self._start.add(value, alarm)
        if start is None or not alarm:
            return None
        ratio = value / max(start, 1e-12)
        return Finding(
            ratio,
            f"train/entropy is {value:.3g} nats at step {seen.step}, {ratio:.3g} times this run's start"
            f"{self.lasting}: the policy is forgetting how to answer, most often after updates that were too large. "
            f"Lower {self.key('train.lr')} or {self.key('train.updates_per_rollout')} and start from an "
            "earlier state.",
            {"value": value, "start": start, "ratio": ratio},
        )


class NoAdvantage(Rule):
    """Two conditions: no group with an advantage for ``patience`` steps, or a high mean over the window."""

    name = "no_advantage"
    needs = ("train/no_advantage_share",)

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._recent: deque[float] = deque(maxlen=config.no_advantage_window)
        self._none_in_a_row = 0
        self._best_reward = 0.0

    @property
    def patience(self) -> int:
        return 1  # counted here, as the two conditions wait differently

    def look(self, seen: Seen) -> Finding | None:
        share, reward = seen.values["train/no_advantage_share"], seen.values.get("reward/mean")
        self._best_reward = max(self._best_reward, reward or 0.0)
        self._recent.append(share)
        self._none_in_a_row = self._none_in_a_row + 1 if share >= 1 else 0
        mean = statistics.fmean(self._recent)
        if self._none_in_a_row >= self.config.patience:
            what = f"no response of the {self._none_in_a_row} steps to step {seen.step} has an advantage"
        elif len(self._recent) == self._recent.maxlen and mean > self.config.no_advantage_share:
            over = f"the {len(self._recent)} steps to step {seen.step}"
            what = f"{mean:.0%} of the responses of {over} have no advantage"
        else:
            return None
        return Finding(
            1.0,
            f"{what}: all rewards of a group are equal, so the update learns nothing from it. "
            + no_advantage_remedy(self, reward, self._best_reward),
            {"share": share, "mean": mean} | ({} if reward is None else {"reward": reward}),
        )


class Guidance(Rule):
    name = "guidance"
    needs = ("guidance/guided_share", "guidance/rows")

    def look(self, seen: Seen) -> Finding | None:
        rows, share = seen.values["guidance/rows"], seen.values["guidance/guided_share"]
        if not rows or share >= self.config.guided_share:
            return None
        reasons = {name: seen.values.get(f"guidance/fallback/{name}", 0.0) for name in FALLBACKS}
        reason = max(reasons, key=lambda name: reasons[name])  # the first of equals
        why, remedy = FALLBACKS[reason]
        return Finding(
            1 - share,
            f"guidance/guided_share is {share:.3f} at step {seen.step}, below {self.config.guided_share:g}"
            f"{self.lasting}; most of the rows that fell back to nearest rounding "
            f"({reasons[reason]:.0f} of {rows:.0f}) are '{reason}': {why}. " + remedy(self),
            {"share": share, "rows": rows, f"fallback/{reason}": reasons[reason]},
        )


class GradNorm(Rule):
    name = "grad_norm"
    needs = ("train/grad_norm",)

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._recent: deque[float] = deque(maxlen=GRAD_WINDOW)

    @property
    def patience(self) -> int:
        return 1  # one such step does the damage

    def look(self, seen: Seen) -> Finding | None:
        value = seen.values["train/grad_norm"]
        median = statistics.median(self._recent) if len(self._recent) >= self.config.baseline_steps else 0.0
        self._recent.append(value)
        if not median or value <= self.config.grad_norm_factor * median:
            return None
        return Finding(
            value / median,
            f"train/grad_norm is {value:.3g} at step {seen.step}, {value / median:.3g} times its running median: a few "
            f"tokens dominate the update, often ones with a large importance weight. {self.key('train.grad_clip')} "
            f"bounds the step; if it happens again lower train.grad_clip, {self.key('train.tis_cap')} or "
            f"{self.key('train.lr')}.",
            {"value": value, "median": median, "ratio": value / median},
        )


class Importance(Rule):
    name = "importance"
    needs = ("tis/clip_frac",)

    def look(self, seen: Seen) -> Finding | None:
        share = seen.values["tis/clip_frac"]
        if share <= self.config.tis_clip_share:
            return None
        return Finding(
            share,
            f"{share:.2%} of the tokens at step {seen.step} have an importance weight above "
            f"{self.key('train.tis_cap')}, more than {self.config.tis_clip_share:.2%}{self.lasting}: the policy "
            "that is trained is no longer the one that was sampled. " + mismatch_remedy(self, seen),
            {"share": share, "limit": self.config.tis_clip_share},
        )


class SequenceWeight(Rule):
    """Of TBPO, whose weight is that of a whole response and has no cap."""

    name = "sequence_weight"
    needs = ("tbpo/weight_far_share", "tbpo/weight_mean")

    def look(self, seen: Seen) -> Finding | None:
        share, mean = (seen.values[name] for name in self.needs)
        if share <= self.config.tis_clip_share:
            return None
        return Finding(
            share,
            f"{share:.2%} of the responses at step {seen.step} have a weight more than 0.1 away from 1 (mean "
            f"{mean:.3g}), more than {self.config.tis_clip_share:.2%}{self.lasting}: method qarl multiplies their loss "
            "by it without a cap, so that few responses may rule the update. " + mismatch_remedy(self, seen),
            {"share": share, "mean": mean, "limit": self.config.tis_clip_share},
        )


class Truncation(Rule):
    name = "truncation"
    needs = ("response/truncated_share",)

    def look(self, seen: Seen) -> Finding | None:
        share = seen.values["response/truncated_share"]
        if share <= self.config.truncated_share:
            return None
        return Finding(
            share,
            f"{share:.0%} of the responses at step {seen.step} were cut off, more than "
            f"{self.config.truncated_share:.0%}{self.lasting}, and score 0: they are longer than "
            f"allowed, or the policy no longer ends them. Raise {self.key('sampling.max_new_tokens')} and "
            f"{self.key('rollout.max_model_len')}; if it began during training, lower {self.key('train.lr')}.",
            {"share": share, "limit": self.config.truncated_share},
        )


class RewardZero(Rule):
    name = "reward_zero"
    needs = ("reward/mean",)

    def __init__(self, config: WatchConfig, settings: Mapping[str, Any]) -> None:
        super().__init__(config, settings)
        self._last_reward: int | None = None

    @property
    def patience(self) -> int:
        return self.config.reward_zero_steps

    def look(self, seen: Seen) -> Finding | None:
        if seen.values["reward/mean"] != 0:
            self._last_reward = seen.step
            return None
        cut = seen.values.get("response/truncated_share", 0.0)
        if self._last_reward is None:
            why = "no response was ever right: the problems are too hard or the verifier does not recognise the answers"
            what = "Read a few responses, then make the problems of [task] easier"
        else:
            why = f"the last reward was at step {self._last_reward}: the policy has collapsed"
            what = f"Lower {self.key('train.lr')} and start from an earlier state"
        return Finding(
            1.0,
            f"reward/mean is 0 at step {seen.step}{self.lasting}, and {why}. {what}; {cut:.0%} of the responses are "
            f"cut off by {self.key('sampling.max_new_tokens')}.",
            {"truncated_share": cut},
        )


class Lag(Rule):
    name = "lag"
    needs = ("policy/lag",)

    @property
    def patience(self) -> int:
        return 1

    def look(self, seen: Seen) -> Finding | None:
        lag, limit = seen.values["policy/lag"], self.setting("train.max_version_diff")
        if limit is None or lag <= limit:
            return None
        return Finding(
            lag,
            f"policy/lag is {lag:.0f} versions at step {seen.step}, more than {self.key('train.max_version_diff')}: "
            "the rollout runs under old weights, and its guidance and routing are not used. Send weights to the "
            "rollout more often, or raise train.max_version_diff if the mismatch allows it.",
            {"lag": lag, "limit": float(limit)},
        )


RULES: tuple[type[Rule], ...] = (
    NonFinite,
    Mismatch,
    MismatchDrift,
    MismatchMax,
    EntropyCollapse,
    EntropyExplosion,
    NoAdvantage,
    Guidance,
    GradNorm,
    Importance,
    SequenceWeight,
    Truncation,
    RewardZero,
    Lag,
)
"""In the order in which they speak."""
