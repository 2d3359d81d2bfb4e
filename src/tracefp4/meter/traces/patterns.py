"""Faults that change the values: each is a test of paired log-probs that gives its figures, or None.

Notation: a the trainer's log-prob, b the rollout's, delta = a - b; of tokens that one of the two sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tracefp4.meter.findings import Finding, number, percent
from tracefp4.meter.traces.prefixes import shared_prefix_slope
from tracefp4.meter.traces.sampling import Floats, Tokens, confidence

Figures = dict[str, float | str]
Test = Callable[[Tokens], Figures | None]

MIN_TOKENS = 50
LOG_BASES = {"log10": math.log(10), "log2": math.log(2)}
_ABOUT_ZERO = 1e-6


def values_of(tokens: Tokens) -> tuple[Floats, Floats]:
    ok = tokens.finite
    return tokens.a[ok], tokens.b[ok]


def mean_abs(x: Floats) -> float:
    return float(np.abs(x).mean()) if len(x) else 0.0


def correlation(x: Floats, y: Floats) -> float:
    """Pearson's; 0 where one of the two is constant."""
    if len(x) < 3 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


# -- not natural log-probs ----------------------------------------------------------------------------------------


def not_logprobs(tokens: Tokens) -> Figures | None:
    """One side holds probabilities, or log-probs without their sign."""
    a, b = values_of(tokens)
    if len(a) < MIN_TOKENS:
        return None
    for side, x, y in (("A", a, b), ("B", b, a)):
        positive = float((x > _ABOUT_ZERO).mean())
        if positive < 0.5 or (y > _ABOUT_ZERO).mean() > 0.01:
            continue
        if x.max() <= 1 + _ABOUT_ZERO and mean_abs(np.log(np.maximum(x, 1e-300)) - y) < mean_abs(-x - y):
            return {"side": side, "what": "probabilities", "positive_share": positive, "max": float(x.max())}
        if correlation(-x, y) > 0.5:
            what = "negative log-probs"
            return {"side": side, "what": what, "positive_share": positive, "correlation": correlation(-x, y)}
    return None


def log_base(tokens: Tokens) -> Figures | None:
    """b = a / ln 10 or a / ln 2 throughout, or the other way round."""
    a, b = values_of(tokens)
    large = (a < -0.05) & (b < -0.02)
    if large.sum() < MIN_TOKENS:
        return None
    x, y = a[large], b[large]
    slope = float((x * y).sum() / (x * x).sum())
    for base, ln in LOG_BASES.items():
        for side, factor in (("B", 1 / ln), ("A", ln)):
            left = mean_abs(y - factor * x)
            if abs(slope / factor - 1) < 0.02 and left < 0.25 * mean_abs(y - x):
                ratio = float(np.median(y / x))
                return {"side": side, "base": base, "factor": factor, "slope": slope, "ratio": ratio, "left": left}
    return None


# -- what the sampler did ------------------------------------------------------------------------------------------


def top_p_or_k(tokens: Tokens) -> Figures | None:
    """One side is renormalised over the tokens that top-p or top-k keeps: never below the other, and 0 at times."""
    a, b = tokens.a, tokens.b
    if len(a) < MIN_TOKENS:
        return None
    for side, raw, kept in (("B", a, b), ("A", b, a)):
        dropped = float((np.isfinite(raw) & np.isneginf(kept)).mean())
        ok = np.isfinite(raw) & np.isfinite(kept)
        if ok.sum() < MIN_TOKENS:
            continue
        gain, raw_ok, kept_ok = kept[ok] - raw[ok], raw[ok], kept[ok]
        up, down = float(np.clip(gain, 0, None).sum()), float(np.clip(-gain, 0, None).sum())
        certain = (np.abs(kept_ok) < _ABOUT_ZERO) & (raw_ok < -0.05)
        raised = float((gain > 0.01).mean())
        # A kept mass below exp(-2.5) or log-probs that do not follow each other are something else.
        if raised < 0.05 or up < 5 * down or gain.mean() < 0.005 or np.quantile(gain, 0.99) > 2.5:
            continue
        if correlation(raw_ok, kept_ok) < 0.5:
            continue
        zeros = float(certain.mean())
        if certain.sum() < 3 and dropped == 0 and up < 20 * down:
            continue
        # The mass that was kept is at least top_p, mostly just above it; noise of both sides blurs the lower end.
        mass = np.exp(-gain[gain > 0.01])
        bound = float(np.quantile(mass, 0.1))
        return {
            "side": side,
            "what": "top-p" if certain.sum() >= 3 else "top-p, top-k or min-p",
            "kept_mass": bound,
            "certain_share": zeros,
            "dropped_share": dropped,
            "raised_share": raised,
            "up_over_down": up / max(down, 1e-12),
        }
    return None


def logit(lp: Floats) -> Floats:
    """log(p / (1 - p)) of log-probs below 0."""
    return lp - np.log(-np.expm1(lp))


def temperature(tokens: Tokens) -> Figures | None:
    """b's distribution is a's at temperature T, by samples that share a prefix where there are enough, else by spread.

    The first gives T exactly, and settles it either way.
    """
    spread = temperature_by_spread(tokens)
    if spread is None:
        return None
    figures, holds = spread
    shared = shared_prefix_slope(tokens)
    if shared is not None and shared.pairs >= 30 and shared.correlation > 0.95:
        figures |= {"T": 1 / shared.slope, "shared_prefixes": float(shared.pairs)}
        if abs(math.log(shared.slope)) < 0.02:  # the difference without its normaliser has no temperature in it
            return None
        holds = holds or (abs(math.log(shared.slope)) >= 0.03 and shared.explained > 0.4)
    return figures if holds else None


def temperature_by_spread(tokens: Tokens) -> tuple[Figures, bool] | None:
    """(figures, whether they are those of a temperature): logit(b) has 1/T times the spread of logit(a).

    For one competitor to the sampled token logit(b) = logit(a) / T exactly. For more of them there is an offset that
    varies with their number: T is then only about right, and explains less of the distance. delta follows the log-prob
    in any case, which it does not where weights or formats differ: there the fit leaves more than .9 of the distance
    and the correlation stays below .25, at a temperature .75 and .5 bound them. Nor is delta of one sign, but at a T
    far from 1, as it is where tokens are cut off. The slope is that of the reduced major axis, which noise on both
    sides does not bend.
    """
    a, b = values_of(tokens)
    ok = (a < -1e-3) & (b < -1e-3) & (a > -25) & (b > -25)
    a, b = a[ok], b[ok]
    if len(a) < MIN_TOKENS:
        return None
    la, lb = logit(a), logit(b)
    if la.std() == 0 or lb.std() == 0:
        return None
    rho = correlation(la, lb)
    slope = float(lb.std() / la.std())
    fitted = slope * (la - la.mean()) + lb.mean()
    left, before = mean_abs(b + np.log1p(np.exp(-fitted))), mean_abs(b - a)
    if before == 0:
        return None
    follows = abs(correlation(a - b, a + b))
    two_sided = abs((a - b).mean()) <= 0.6 * before or abs(math.log(slope)) >= 0.4
    holds = rho >= 0.9 and abs(math.log(slope)) >= 0.03 and left <= 0.8 * before and follows >= 0.45 and two_sided
    return {"T": 1 / slope, "explained": 1 - left / before, "correlation": rho}, holds


# -- policies that differ ---------------------------------------------------------------------------------------------


def per_row(tokens: Tokens) -> Floats:
    """f64 [r]: mean |delta| of each row; NaN where a row has no finite token."""
    ok = tokens.finite
    size = np.abs(tokens.a[ok] - tokens.b[ok])
    counts = np.bincount(tokens.row[ok], minlength=tokens.rows)
    sums = np.bincount(tokens.row[ok], weights=size, minlength=tokens.rows)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def stale_policy(tokens: Tokens) -> Figures | None:
    """The distance grows with the policy lag, or where none is given with the step, and its KL is positive."""
    size = per_row(tokens)
    for name, value in (("lag", tokens.lag), ("step", np.where(tokens.step >= 0, tokens.step, np.nan))):
        known = ~np.isnan(value) & ~np.isnan(size)
        levels = np.unique(value[known])
        if len(levels) < (2 if name == "lag" else 4):
            continue
        means = np.array([size[known & (value == level)].mean() for level in levels])
        quarter = max(1, len(levels) // 4)
        first, last = float(means[:quarter].mean()), float(means[-quarter:].mean())
        rank = rank_correlation(value[known], size[known])
        if last > 2 * first and rank > 0.3:
            ok = tokens.finite
            return {
                "by": name,
                "from": float(levels[0]),
                "to": float(levels[-1]),
                "first": first,
                "last": last,
                "rank_correlation": rank,
                "kl_k1": float((tokens.b[ok] - tokens.a[ok]).mean()),
            }
    return None


def rank_correlation(x: Floats, y: Floats) -> float:
    """Spearman's, with mean ranks for ties."""

    def ranks(values: Floats) -> Floats:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        return (np.cumsum(counts) - (counts - 1) / 2)[inverse].astype(np.float64)

    return correlation(ranks(x), ranks(y))


def unrelated(tokens: Tokens) -> Figures | None:
    """The two log-probs of a token have next to nothing to do with each other."""
    a, b = values_of(tokens)
    if len(a) < MIN_TOKENS:
        return None
    rho = correlation(a, b)
    if rho > 0.3 or mean_abs(a - b) < 0.3:
        return None
    return {"correlation": rho, "mean_a": float(a.mean()), "mean_b": float(b.mean())}


def shape_of_broad(tokens: Tokens) -> Figures:
    """What a distance without a pattern depends on."""
    a, b = values_of(tokens)
    size = np.abs(a - b)
    ok = tokens.finite
    few = np.sort(size)[::-1][: max(1, len(size) // 100)].sum() / max(size.sum(), 1e-300)
    per_id = 0.0
    if tokens.ids is not None and len(a) > 200:
        _, inverse = np.unique(tokens.ids[ok], return_inverse=True)
        counts, delta = np.bincount(inverse), (a - b) - (a - b).mean()  # a distance of one sign is no matter of ids
        means = np.bincount(inverse, weights=delta) / np.maximum(counts, 1)
        total = float((delta**2).sum())
        chance = (len(counts) - 1) / (len(inverse) - 1)  # as much do the means of that many groups explain of noise
        share = float((counts * means**2).sum()) / total if total else 0.0
        per_id = max(0.0, (share - chance) / (1 - chance)) if chance < 1 else 0.0
    return {
        "size_over_surprise": correlation(-a, size),
        "size_over_position": rank_correlation(tokens.position[ok].astype(np.float64), size),
        "share_of_worst_percent": float(few),
        "signed_over_size": float((a - b).mean() / max(size.mean(), 1e-300)),
        "explained_by_token_id": per_id,
    }


# -- what is said of them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A test and its words. same: figures that must be equal in a resample for it to count as the same finding."""

    kind: str
    test: Test
    words: Callable[[Figures, Tokens], tuple[str, tuple[str, ...], str]]
    same: tuple[str, ...] = ()

    def find(self, tokens: Tokens) -> Finding | None:
        figures = self.test(tokens)
        if figures is None:
            return None
        found = figures

        def holds(again: Tokens) -> bool:
            other = self.test(again)
            return other is not None and all(other[name] == found[name] for name in self.same)

        sure = confidence(tokens, holds)
        if sure < 0.5:
            return None
        title, evidence, remedy = self.words(found, tokens)
        return Finding(self.kind, title, sure, evidence, remedy, found)


def _f(figures: Figures, name: str) -> float:
    return float(figures[name])


def _other(side: object) -> str:
    return "B" if side == "A" else "A"


def _not_logprobs_words(f: Figures, _: Tokens) -> tuple[str, tuple[str, ...], str]:
    side, what = f["side"], f["what"]
    probabilities = what == "probabilities"
    title = f"{side} holds {what}, not log-probs"
    evidence: tuple[str, ...] = (
        f"{percent(_f(f, 'positive_share'))} of its values are above 0, the other side's are not",
    )
    if probabilities:
        evidence += (
            f"none exceeds 1 (the largest is {number(_f(f, 'max'))}), and their logarithms are near the others",
        )
    else:
        evidence += (f"with their sign turned they follow the other side (correlation {_f(f, 'correlation'):.3f})",)
    return title, evidence, f"write {'log(p)' if probabilities else '-x'} for each value x of {side}"


def _log_base_words(f: Figures, _: Tokens) -> tuple[str, tuple[str, ...], str]:
    side, base = f["side"], f["base"]
    ln = LOG_BASES[str(base)]
    evidence = (
        f"B is {number(_f(f, 'slope'))} times A throughout (median ratio {number(_f(f, 'ratio'))}); {base} of a number "
        f"is {number(1 / ln)} times its natural logarithm",
        f"without that factor a mean difference of {number(_f(f, 'left'))} remains",
    )
    return f"{side} is in {base}, not in natural logarithms", evidence, f"multiply {side} by {ln:.6g}"


def _top_words(f: Figures, _: Tokens) -> tuple[str, tuple[str, ...], str]:
    side, what, raw = f["side"], f["what"], _other(f["side"])
    evidence = [
        f"{side} is above {raw} in {percent(_f(f, 'raised_share'))} of the tokens and hardly ever below: the rest "
        "of the "
        "distribution was cut off and the kept part made to sum to 1",
        f"the mass kept is from about {_f(f, 'kept_mass'):.2f} on, which for top-p is its value",
    ]
    if what == "top-p":
        evidence.append(
            f"{percent(_f(f, 'certain_share'))} of the tokens have log-prob 0 in {side} and less in {raw}: each alone "
            "in the nucleus"
        )
    if _f(f, "dropped_share"):
        evidence.append(f"{percent(_f(f, 'dropped_share'))} of the tokens are impossible (-inf) in {side}")
    remedy = (
        f"take log-probs before the sampler cuts (vLLM: logprobs_mode raw_logprobs), or apply the same cut in {raw}; "
        "sampling with top_p 1 and top_k off removes the difference"
    )
    return f"log-probs of {side} are taken after {what} renormalisation", tuple(evidence), remedy


def _temperature_words(f: Figures, tokens: Tokens) -> tuple[str, tuple[str, ...], str]:
    t = _f(f, "T")
    evidence = [
        f"logits of B spread {number(1 / t)} times as far as those of A (correlation {_f(f, 'correlation'):.3f}); that "
        f"alone explains {percent(_f(f, 'explained'))} of the distance"
    ]
    if "shared_prefixes" in f:
        evidence.append(
            f"between {f['shared_prefixes']:.0f} pairs of tokens after one and the same context, where the normaliser "
            f"cancels, differences of B are {number(1 / t)} times those of A"
        )
    stated = tokens.temperature[~np.isnan(tokens.temperature)]
    if len(stated) and (stated == stated[0]).all():
        own = float(stated[0])
        if abs(own / t - 1) < 0.1:
            evidence.append(f"the file says temperature {own:g}: B is divided by it, A is not")
        elif abs(own * t - 1) < 0.1:
            evidence.append(f"the file says temperature {own:g}: A is divided by it, B is not")
    about = "" if "shared_prefixes" in f else "about "
    title = f"B is at temperature {about}{t:.2f} relative to A"
    remedy = (
        "take both log-probs from logits divided by the sampling temperature, or both from raw logits (vLLM: "
        "logprobs_mode; trainer: divide the logits before log_softmax)"
    )
    return title, tuple(evidence), remedy


def _stale_words(f: Figures, _: Tokens) -> tuple[str, tuple[str, ...], str]:
    by = str(f["by"])
    what = "policy lag" if by == "lag" else "step"
    evidence = (
        f"mean |delta| rises from {number(_f(f, 'first'))} at {what} {_f(f, 'from'):g} to {number(_f(f, 'last'))} "
        f"at {what} "
        f"{_f(f, 'to'):g} (rank correlation over rows {_f(f, 'rank_correlation'):.2f})",
        f"mean(log p_B - log p_A) is {_f(f, 'kl_k1'):+.3g}: "
        + (
            "the tokens are likelier under B, whose policy sampled them"
            if _f(f, "kl_k1") > 0
            else "it is not positive, so the tokens were not sampled from B"
        ),
    )
    title = "the rollout's policy is stale" + (": the distance grows with its lag" if by == "lag" else "")
    if by == "step":
        title = "the policies drift apart step by step, as with a rollout that no longer gets new weights"
    return (
        title,
        evidence,
        "check that weight updates reach the rollout (its version must rise with the trainer's), and lower the "
        "allowed lag",
    )


def _unrelated_words(f: Figures, _: Tokens) -> tuple[str, tuple[str, ...], str]:
    a, b = _f(f, "mean_a"), _f(f, "mean_b")
    evidence = [f"the log-probs of a token correlate by {_f(f, 'correlation'):.2f} only; shifting them does not help"]
    if abs(a - b) > 1:
        low = "A" if a < b else "B"
        evidence.append(
            f"{low} is much lower (mean {number(min(a, b))} and {number(max(a, b))}): its log-probs are of tokens "
            "that were "
            "not sampled there, as with labels that were not shifted before the gather, or of another model"
        )
    return (
        "the two log-probs have nothing to do with each other",
        tuple(evidence),
        "check that both files are of the same responses and the same model, and that log-probs are gathered at the "
        "next token",
    )


VALUE_PATTERNS = (
    Pattern("not_logprobs", not_logprobs, _not_logprobs_words, ("side", "what")),
    Pattern("log_base", log_base, _log_base_words, ("side", "base")),
    Pattern("top_p", top_p_or_k, _top_words, ("side",)),
    Pattern("temperature", temperature, _temperature_words),
    Pattern("unrelated", unrelated, _unrelated_words),
)
"""At most one of these is named: the first whose test holds."""

STALE = Pattern("stale_policy", stale_policy, _stale_words, ("by",))


def broad(tokens: Tokens, ceiling: float) -> Finding | None:
    """A distance above the ceiling that no other pattern explains."""

    def above(t: Tokens) -> bool:
        a, b = values_of(t)
        return mean_abs(a - b) > ceiling

    if not tokens.rows or not above(tokens):
        return None
    a, b = values_of(tokens)
    f = shape_of_broad(tokens)
    evidence = [f"mean |delta| is {number(mean_abs(a - b))}, above {number(ceiling)}, in no pattern that is known here"]
    if _f(f, "size_over_surprise") > 0.2:
        evidence.append(
            f"it is proportional to -log p (correlation {_f(f, 'size_over_surprise'):.2f}), as errors of the logits "
            "are: "
            "rounding in other formats, one layer's scale, or other weights"
        )
    if _f(f, "size_over_position") > 0.2:
        evidence.append(
            f"it grows with the position (rank correlation {_f(f, 'size_over_position'):.2f}), as errors of the KV "
            "cache do"
        )
    if _f(f, "share_of_worst_percent") > 0.3:
        evidence.append(f"the worst 1 % of the tokens hold {percent(_f(f, 'share_of_worst_percent'))} of it")
    if _f(f, "explained_by_token_id") > 0.2:
        evidence.append(
            f"{percent(_f(f, 'explained_by_token_id'))} of its square is a constant of the token id: weights differ"
        )
    if abs(_f(f, "signed_over_size")) > 0.5:
        evidence.append(f"it is one-sided: A is {'above' if _f(f, 'signed_over_size') > 0 else 'below'} B")
    remedy = (
        "find the layer and the site with `tracefp4 meter --train A --rollout B --prompts FILE` on the two checkpoints"
    )
    sure = confidence(tokens, above)
    return Finding("broad", "a broad difference without a simple pattern", sure, tuple(evidence), remedy, f)


def mask_of_tail(ids: NDArray[np.int64]) -> int:
    """Number of tokens before the last run of one id."""
    if not len(ids):
        return 0
    same = ids == ids[-1]
    return int(len(ids) - (np.argmin(same[::-1]) if not same.all() else len(ids)))
