"""A fault of some rows, positions or token ids is named as one, with what its members have in common; a clean pair and
a fault of all rows are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meter.test_faults import SEED, clean, meter, only, trainer_rows
from meter.tracedata import NEW_TOKENS, Row, Sampled, crowded, pick, sampled
from tracefp4.meter.findings import Finding
from tracefp4.meter.traces.partial import split_rows
from tracefp4.meter.traces.which import separation

COUNT = 192


def some(
    folder: Path, member: Callable[[int], bool], change: Callable[[Sampled, Row], Row], extra: Any = None
) -> Finding:
    """The finding where the rollout's rows that are members are changed. extra: (index) -> more fields of a line."""
    samples = sampled(SEED)
    a, b = clean()
    b = [change(s, row) if member(i) else row for i, (s, row) in enumerate(zip(samples, b, strict=True))]
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        x.extra = y.extra = {"sample_id": str(i)} | (extra(i) if extra else {})
    return only(meter(folder, (a, b)))


def noisy(seed: int = 0, size: float = 0.6) -> Callable[[Sampled, Row], Row]:
    rng = np.random.default_rng(seed)
    return lambda s, row: Row(row.ids, row.logprobs + rng.normal(0, size, len(row.ids)))


def tempered(s: Sampled, row: Row) -> Row:
    return Row(row.ids, pick(s.logits, row.ids, 0.6))


def shifted(s: Sampled, row: Row) -> Row:
    return Row(row.ids, np.roll(row.logprobs, 1))


def said(finding: Finding, words: str) -> bool:
    return any(words in sentence for sentence in finding.evidence)


@pytest.mark.parametrize("share", [0.03, 0.25, 0.6])
def test_scattered_rows(tmp_path: Path, share: float) -> None:
    chosen = np.random.default_rng(7).random(COUNT) < share
    finding = some(tmp_path, lambda i: bool(chosen[i]), noisy())
    assert finding.kind == "some_rows"
    assert finding.values["share"] == pytest.approx(chosen.mean(), abs=0.011)
    assert float(finding.values["inside"]) == pytest.approx(0.4, rel=0.15)
    assert float(finding.values["outside"]) < 0.05
    assert finding.values["which"] == ""
    assert said(finding, "nothing in common")


@pytest.mark.parametrize(
    ("change", "cause", "words"), [(tempered, "temperature", "at temperature"), (shifted, "shift", "1 position too")]
)
def test_the_fault_of_the_rows_is_named(tmp_path: Path, change: Any, cause: str, words: str) -> None:
    finding = some(tmp_path, lambda i: i % 4 == 1, change)
    assert (finding.kind, finding.values["cause"]) == ("some_rows", cause)
    assert words in finding.title
    assert finding.values["share"] == pytest.approx(0.25, abs=0.02)
    assert said(finding, "1 of every 4 rows (number 2 of each 4)")
    assert "compare the workers" in finding.remedy


def test_one_piece_of_the_file(tmp_path: Path) -> None:
    finding = some(tmp_path, lambda i: 96 <= i < 120, noisy())
    assert finding.values["which"] == "lines"
    assert said(finding, "lines 97 to 120 of A") or said(finding, "lines 98 to 120 of A")


def test_the_answers_to_some_prompts(tmp_path: Path) -> None:
    group = {g: k for k, g in enumerate(np.random.default_rng(1).permutation(24).tolist())}
    finding = some(
        tmp_path, lambda i: group[i % 24] < 3, noisy(), extra=lambda i: {"prompt": f"question {i % 24} of the set"}
    )
    assert "prompt" in str(finding.values["which"])
    assert said(finding, "answers to 3 of 24 prompts")


def test_steps_after_a_change(tmp_path: Path) -> None:
    """Without a lag and with fewer steps than a drift is read from."""
    finding = some(tmp_path, lambda i: i // 64 == 2, noisy(), extra=lambda i: {"step": 5 + i // 64})
    assert str(finding.values["which"]).startswith("step")
    assert said(finding, "from step 7 on")


def test_the_long_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, NEW_TOKENS + 1, COUNT)
    a, b = clean()
    a, b = ([Row(r.ids[:n], r.logprobs[:n]) for r, n in zip(rows, lengths, strict=True)] for rows in (a, b))
    b = [Row(r.ids, r.logprobs + rng.normal(0, 0.6, len(r.ids))) if len(r.ids) >= 20 else r for r in b]
    finding = only(meter(tmp_path, (a, b)))
    assert (finding.kind, str(finding.values["which"])) == ("some_rows", "length")
    assert said(finding, "they are the long ones: 22 tokens (median) against 13")
    assert "chunked prefill" in finding.remedy


def test_rows_that_hold_a_token(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a, b = clean()
    rng = np.random.default_rng(0)
    for i in range(0, COUNT, 5):  # a tool's answer: one token that no other row has
        a[i].ids = b[i].ids = [*samples[i].response[:3], 40, *samples[i].response[4:]]
        b[i].logprobs = b[i].logprobs + rng.normal(0, 0.6, NEW_TOKENS)
    finding = only(meter(tmp_path, (a, b)))
    assert said(finding, "token 40 is in all of them")


@pytest.mark.parametrize(("first", "last", "where"), [(16, NEW_TOKENS, "late"), (0, 1, "early"), (0, 4, "early")])
def test_positions(tmp_path: Path, first: int, last: int, where: str) -> None:
    rng = np.random.default_rng(0)
    a, b = clean()
    for row in b:
        row.logprobs = row.logprobs.copy()
        row.logprobs[first:last] += rng.normal(0, 0.8, last - first)
    finding = only(meter(tmp_path, (a, b)))
    assert (finding.kind, finding.values["where"]) == ("some_positions", where)
    assert finding.values["position"] == (first if where == "late" else last)
    assert float(finding.values["inside"]) > 0.4
    assert float(finding.values["outside"]) < 0.05


def test_late_positions_are_not_long_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = clean()
    lengths = rng.integers(6, NEW_TOKENS + 1, COUNT)
    a, b = ([Row(r.ids[:n], r.logprobs[:n].copy()) for r, n in zip(rows, lengths, strict=True)] for rows in (a, b))
    for row in b:
        row.logprobs[14:] += rng.normal(0, 1.0, max(0, len(row.ids) - 14))
    finding = only(meter(tmp_path, (a, b)))
    assert (finding.kind, finding.values["position"]) == ("some_positions", 14)


def test_late_positions_of_some_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def change(s: Sampled, row: Row) -> Row:
        return Row(row.ids, np.concatenate([row.logprobs[:8], row.logprobs[8:] + rng.normal(0, 0.8, NEW_TOKENS - 8)]))

    finding = some(tmp_path, lambda i: i % 3 == 0, change)
    assert (finding.kind, finding.values["cause"]) == ("some_rows", "positions")
    assert "jumps at position 8" in finding.title
    assert said(finding, "1 of every 3 rows")


def test_a_slow_growth_over_positions_has_no_step(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = clean()
    ramp = np.linspace(0, 0.8, NEW_TOKENS)
    b = [Row(r.ids, r.logprobs + ramp * rng.normal(0, 1, NEW_TOKENS)) for r in b]
    finding = only(meter(tmp_path, (a, b)))
    assert finding.kind == "broad"
    assert said(finding, "grows with the position")


def test_some_token_ids(tmp_path: Path) -> None:
    samples = crowded(noise=0.02)
    bad = set(np.random.default_rng(2).permutation(400)[:24].tolist())
    offset = np.array([1.5 if i in bad else 0.0 for i in range(400)])
    a = [Row(s.response, s.rollout + offset[s.response]) for s in samples]
    b = [Row(s.response, s.rollout + np.random.default_rng(i).normal(0, 0.02, 40)) for i, s in enumerate(samples)]
    finding = only(meter(tmp_path, (a, b)))
    assert finding.kind == "some_tokens"
    assert float(finding.values["share"]) == pytest.approx(24 / 400, abs=0.03)
    assert float(finding.values["held"]) > 0.5
    assert "embedding and head" in finding.remedy


def rows_of_two_tasks(seed: int) -> tuple[list[Row], list[Row]]:
    """Half of the rows near-certain, half of them open: BF16 noise that differs from row to row."""
    rng = np.random.default_rng(seed)
    a, b = [], []
    for i in range(COUNT):
        surprise = rng.exponential(0.15 if i % 2 else 1.2, NEW_TOKENS)
        noise = 0.02 * (surprise + 0.05) * rng.normal(size=NEW_TOKENS) * rng.lognormal(0, 0.3)
        ids = rng.integers(2, 32, NEW_TOKENS).tolist()
        a.append(Row(ids, -surprise))
        b.append(Row(ids, -surprise + noise))
    return a, b


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_other_kinds_are_no_fault(tmp_path: Path, seed: int) -> None:
    result = meter(tmp_path, rows_of_two_tasks(seed))
    assert result.findings == ()
    assert result.verdict.passed


@pytest.mark.parametrize("size", [0.3, 1.0])
def test_noise_in_all_rows_is_not_a_part(tmp_path: Path, size: float) -> None:
    for seed in range(3):
        rng = np.random.default_rng(seed)
        a, b = clean()
        b = [Row(r.ids, r.logprobs + rng.lognormal(0, 0.5) * rng.normal(0, size, NEW_TOKENS)) for r in b]
        assert [f.kind for f in meter(tmp_path, (a, b)).findings] == ["broad"]


def test_a_fault_of_all_rows_stays_one(tmp_path: Path) -> None:
    """At a temperature, near-certain rows differ less than the others: that makes no part of them."""
    samples = [*crowded(0.7), *crowded(0.7, noise=0.001)]
    result = meter(tmp_path, (trainer_rows(samples), [Row(s.response, s.rollout) for s in samples]))
    assert [f.kind for f in result.findings] == ["temperature"]


def split(values: Sequence[float]) -> Any:
    return split_rows(np.array(values), np.full(len(values), 10.0), 0.1)


def test_the_split() -> None:
    assert split([0.02] * 50 + [0.9] * 2) is None  # fewer rows than make a part
    found = split([0.02] * 50 + [0.9] * 3)
    assert (found.flags.sum(), found.inside, found.outside) == (3, pytest.approx(0.9), pytest.approx(0.02))
    assert split([0.001] * 50 + [0.09] * 20) is None  # apart, but within the ceiling
    assert split([0.2] * 50 + [0.5] * 20) is None
    assert split([float("nan")] * 80) is None
    rng = np.random.default_rng(0)
    for spread in (0.2, 0.5, 1.0):
        for _ in range(20):
            assert split(rng.lognormal(0, spread, 300).tolist()) is None


def test_separation_counts_ties_half() -> None:
    flags = np.array([True, True, False, False])
    assert separation(np.array([3.0, 4.0, 1.0, 2.0]), flags) == 1
    assert separation(np.array([1.0, 1.0, 1.0, 1.0]), flags) == 0.5
    assert separation(np.array([1.0, 3.0, 2.0, 4.0]), flags) == 0.25
