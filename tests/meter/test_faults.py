"""Every planted fault is named, and nothing is named where there is none. Log-probs are those of a real tiny model."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from meter.tracedata import (
    NEW_TOKENS,
    Row,
    Sampled,
    crowded,
    drifted_model,
    nucleus,
    pick,
    sampled,
    score,
    top_k,
    write_rows,
)
from tracefp4.meter.findings import Finding
from tracefp4.meter.traces.run import TraceRequest, TraceResult, meter_traces

Rows = tuple[list[Row], list[Row]]
SEED = 3


def trainer_rows(samples: Sequence[Sampled], temperature: float = 1.0) -> list[Row]:
    return [Row(s.response, s.trainer(temperature), {"prompt_ids": s.prompt}) for s in samples]


def rollout_rows(samples: Sequence[Sampled]) -> list[Row]:
    return [Row(s.response, s.rollout, {"prompt_ids": s.prompt}) for s in samples]


def clean(seed: int = SEED) -> Rows:
    samples = sampled(seed)
    return trainer_rows(samples), rollout_rows(samples)


def meter(folder: Path, rows: Rows, **request: float) -> TraceResult:
    a, b = rows
    return meter_traces(
        TraceRequest(write_rows(folder / "a.jsonl", a), write_rows(folder / "b.jsonl", b), **request)  # type: ignore[arg-type]
    )


def only(result: TraceResult) -> Finding:
    assert len(result.findings) == 1, [f.title for f in result.findings]
    assert not result.verdict.passed
    assert result.findings[0].title in result.verdict.reasons
    return result.findings[0]


def floor(seed: int = SEED) -> float:
    a, b = clean(seed)
    return float(np.abs(np.concatenate([x.logprobs - y.logprobs for x, y in zip(a, b, strict=True)])).mean())


@pytest.mark.parametrize("seed", range(6))
def test_a_clean_pair_yields_nothing(tmp_path: Path, seed: int) -> None:
    a, b = clean(seed)
    for i, row in enumerate(a):
        row.extra["step"] = i // 24
    result = meter(tmp_path, (a, b))
    assert result.findings == ()
    assert result.verdict.passed
    assert result.pairing["relations"] == {"equal": 192}
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(floor(seed))


@pytest.mark.parametrize("seed", range(2))
def test_fp4_noise_is_broad_and_no_fault(tmp_path: Path, seed: int) -> None:
    samples = sampled(seed, "qat")
    finding = only(meter(tmp_path, (trainer_rows(samples), rollout_rows(samples)), floor=floor(), band=1.2))
    assert finding.kind == "broad"
    assert "--train A --rollout B" in finding.remedy


def test_many_token_ids_explain_nothing_by_chance(tmp_path: Path) -> None:
    samples = crowded(noise=0.2)
    noise = only(meter(tmp_path, (trainer_rows(samples), rollout_rows(samples))))
    assert not any("constant of the token id" in sentence for sentence in noise.evidence)
    bias = np.random.default_rng(1).normal(0, 0.5, 400)
    a = [Row(s.response, s.rollout + bias[s.response]) for s in samples]
    weights = only(meter(tmp_path, (a, rollout_rows(samples))))
    assert weights.values["explained_by_token_id"] == pytest.approx(1)
    assert any("constant of the token id" in sentence for sentence in weights.evidence)


def test_within_the_band_of_a_floor(tmp_path: Path) -> None:
    assert meter(tmp_path, clean(), floor=floor() / 1.1, band=1.2).verdict.passed
    outside = meter(tmp_path, clean(), floor=floor() / 1.5, band=1.2)
    assert not outside.verdict.passed
    assert outside.verdict.ceiling == pytest.approx(1.2 * floor() / 1.5)


@pytest.mark.parametrize(
    ("shift", "words"), [(1, "1 position too late"), (-1, "1 position too early"), (2, "2 positions")]
)
def test_shift(tmp_path: Path, shift: int, words: str) -> None:
    a, b = clean()
    result = meter(tmp_path, (a, [Row(r.ids, np.roll(r.logprobs, shift)) for r in b]))
    finding = only(result)
    assert finding.kind == "shift"
    assert words in finding.title
    assert finding.values["shift"] == -shift
    assert finding.confidence == 1
    # What is reported is of the rows laid right; as given, the distance is that of unrelated tokens.
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] < 2 * floor()
    assert result.as_given is not None
    assert result.as_given["mismatch/logprob_abs_diff_mean"] > 1


def test_shifted_token_ids(tmp_path: Path) -> None:
    a, b = clean()
    ahead = [Row([*r.ids[1:], 5], np.append(r.logprobs[1:], -1.0)) for r in b]
    result = meter(tmp_path, (a, ahead))
    finding = only(result)
    assert (finding.kind, finding.values["ahead"]) == ("shift", "B")
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] < 2 * floor()


@pytest.mark.parametrize("temperature", [0.6, 0.9, 1.2, 1.5])
@pytest.mark.parametrize("prompts", [True, False])
def test_temperature(tmp_path: Path, temperature: float, prompts: bool) -> None:
    rows = trainer_rows(sampled(SEED), temperature), rollout_rows(sampled(SEED))
    for row in (*rows[0], *rows[1]):
        row.extra = row.extra if prompts else {}
    finding = only(meter(tmp_path, rows))
    assert finding.kind == "temperature"
    # A is at the temperature, so that B is at its inverse relative to A.
    assert finding.values["T"] == pytest.approx(1 / temperature, rel=0.04)
    assert ("shared_prefixes" in finding.values) == prompts


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.25, 1.6])
@pytest.mark.parametrize("raw", ["A", "B"])
def test_temperature_where_many_tokens_compete(tmp_path: Path, temperature: float, raw: str) -> None:
    samples = crowded(temperature)
    a = trainer_rows(samples, 1.0 if raw == "A" else temperature)
    b = rollout_rows(samples) if raw == "A" else [Row(s.response, s.trainer(), {}) for s in samples]
    finding = only(meter(tmp_path, (a, b)))
    assert finding.kind == "temperature"
    assert "about" in finding.title
    assert finding.values["T"] == pytest.approx(
        temperature if raw == "A" else 1 / temperature, rel=0.2
    )  # drawn towards 1


@pytest.mark.parametrize(("noise", "top_k"), [(0.05, 400), (0.2, 400), (0.04, 5), (0.04, 10)])
def test_no_temperature_is_seen_in_noise_or_a_cut(tmp_path: Path, noise: float, top_k: int) -> None:
    samples = crowded(noise=noise, top_k=top_k)
    result = meter(tmp_path, (trainer_rows(samples), rollout_rows(samples)))
    assert "temperature" not in [f.kind for f in result.findings]


def test_shifted_log_probs_have_no_contexts(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a = [Row(r.ids, np.roll(r.logprobs, -1), r.extra) for r in trainer_rows(samples, 0.7)]
    shift, temperature = meter(tmp_path, (a, rollout_rows(samples))).findings
    assert (shift.kind, temperature.kind) == ("shift", "temperature")
    # Whose token ids the shifted log-probs are of is open, and so what they share.
    assert "shared_prefixes" not in temperature.values


def test_a_stated_temperature_says_which_side(tmp_path: Path) -> None:
    samples = sampled(SEED)
    b = [Row(s.response, pick(s.logits, s.response, 0.7), {"temperature": 0.7}) for s in samples]
    finding = only(meter(tmp_path, (trainer_rows(samples), b)))
    assert finding.kind == "temperature"
    assert "the file says temperature 0.7: B is divided by it, A is not" in finding.evidence


@pytest.mark.parametrize("top_p", [0.95, 0.9, 0.7])
def test_top_p(tmp_path: Path, top_p: float) -> None:
    samples = sampled(SEED)
    b = [Row(s.response, nucleus(s.logits, s.response, top_p)) for s in samples]
    finding = only(meter(tmp_path, (trainer_rows(samples), b)))
    assert finding.kind == "top_p"
    assert "top-p" in finding.title
    assert finding.values["side"] == "B"
    assert finding.values["kept_mass"] == pytest.approx(top_p, abs=0.03)


def test_top_k(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a = [Row(s.response, top_k(s.logits, s.response, 8)) for s in samples]
    result = meter(tmp_path, (a, rollout_rows(samples)))
    finding = only(result)
    assert (finding.kind, finding.values["side"]) == ("top_p", "A")
    assert "top-k" in finding.title
    assert result.figures.impossible == sum(int(np.isneginf(r.logprobs).sum()) for r in a) > 0


@pytest.mark.parametrize(("base", "ln"), [("log10", np.log(10)), ("log2", np.log(2))])
@pytest.mark.parametrize("side", ["A", "B"])
def test_log_base(tmp_path: Path, base: str, ln: float, side: str) -> None:
    a, b = clean()
    wrong = [Row(r.ids, r.logprobs / ln) for r in (a if side == "A" else b)]
    finding = only(meter(tmp_path, (wrong, b) if side == "A" else (a, wrong)))
    assert (finding.kind, finding.values["base"], finding.values["side"]) == ("log_base", base, side)


@pytest.mark.parametrize(("change", "what"), [(np.exp, "probabilities"), (np.negative, "negative log-probs")])
def test_not_log_probs(tmp_path: Path, change: Callable[[np.ndarray], np.ndarray], what: str) -> None:
    a, b = clean()
    finding = only(meter(tmp_path, (a, [Row(r.ids, change(r.logprobs)) for r in b])))
    assert (finding.kind, finding.values["what"]) == ("not_logprobs", what)


def test_shuffled_rows_by_token_ids(tmp_path: Path) -> None:
    a, b = clean()
    order = np.random.default_rng(0).permutation(len(b))
    result = meter(tmp_path, (a, [b[i] for i in order]))
    finding = only(result)
    assert finding.kind == "shuffled_rows"
    row = int(np.flatnonzero(order != np.arange(len(order)))[0])
    assert f"line {row + 1} of A is line {int(np.flatnonzero(order == row)[0]) + 1} of B" in finding.evidence
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(floor())


def test_shuffled_log_probs_under_the_right_tokens(tmp_path: Path) -> None:
    a, b = clean()
    order = np.random.default_rng(0).permutation(len(b))
    finding = only(meter(tmp_path, (a, [Row(r.ids, b[i].logprobs) for r, i in zip(a, order, strict=True)])))
    assert finding.kind == "shuffled_rows"
    assert "log-probs of B are those of other rows" in finding.title


def test_samples_with_ids_are_paired_by_them(tmp_path: Path) -> None:
    a, b = clean()
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        x.extra, y.extra = {"sample_id": f"s{i}"}, {"sample_id": f"s{i}"}
    result = meter(tmp_path, (a, b[::-1]))
    assert result.findings == ()
    assert result.pairing["by"] == "id"


def test_stale_policy_over_steps(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a, b = [], []
    for step in range(8):
        part = samples[24 * step : 24 * (step + 1)]
        logits = score([s.prompt + s.response for s in part], model=drifted_model(step))
        a += [Row(s.response, pick(x, s.response), {"step": step}) for s, x in zip(part, logits, strict=True)]
        b += [Row(s.response, s.rollout, {"step": step}) for s in part]
    result = meter(tmp_path, (a, b))
    finding = only(result)
    assert (finding.kind, finding.values["by"]) == ("stale_policy", "step")
    assert float(finding.values["kl_k1"]) > 0
    assert "likelier under B" in finding.evidence[1]
    assert [point["step"] for point in result.figures.by_step] == list(range(8))
    assert result.figures.by_step[-1]["mean"] > 2 * result.figures.by_step[0]["mean"]


def test_stale_policy_by_weight_versions(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a, b = [], []
    for lag in (0, 4):
        part = samples[lag // 4 :: 2]
        logits = score([s.prompt + s.response for s in part], model=drifted_model(lag))
        a += [Row(s.response, pick(x, s.response), {"train_version": 9}) for s, x in zip(part, logits, strict=True)]
        b += [Row(s.response, s.rollout, {"lag": lag}) for s in part]
    finding = only(meter(tmp_path, (a, b)))
    assert (finding.kind, finding.values["by"]) == ("stale_policy", "lag")


def test_another_tokenizer_with_other_numbers(tmp_path: Path) -> None:
    a, b = clean()
    numbers = np.random.default_rng(0).permutation(500)
    result = meter(tmp_path, (a, [Row([int(numbers[t]) for t in r.ids], r.logprobs) for r in b]))
    finding = only(result)
    assert finding.kind == "tokenizer"
    assert finding.values["mapped"] == 1
    assert result.figures.tokens == 0  # positions of two tokenizers do not belong together


def test_another_tokenizer_with_other_pieces(tmp_path: Path) -> None:
    a, b = clean()
    rows = []
    for r in b:
        ids, values = [], []
        for token, value in zip(r.ids, r.logprobs, strict=True):
            ids += [token + 100] if token % 3 else [40, token]
            values += [value] if token % 3 else [value / 2] * 2
        rows.append(Row(ids, np.array(values)))
    finding = only(meter(tmp_path, (a, rows)))
    assert finding.kind == "tokenizer"
    assert float(finding.values["length_ratio"]) > 1.1
    assert any("cut into other pieces" in sentence for sentence in finding.evidence)


def test_two_generations_are_not_two_tokenizers(tmp_path: Path) -> None:
    a, b = clean()
    other = [Row(r.ids[:5] + q.ids[5:], r.logprobs) for r, q in zip(b, [*b[8:], *b[:8]], strict=True)]
    finding = only(meter(tmp_path, (a, other)))
    assert finding.kind == "other_responses"
    assert "teacher forcing" in finding.remedy


def test_two_generations_that_never_agree_are_not_two_tokenizers(tmp_path: Path) -> None:
    a, b = clean()
    other = [Row([*q.ids[1:], q.ids[0]], r.logprobs) for r, q in zip(b, [*b[100:], *b[:100]], strict=True)]
    finding = only(meter(tmp_path, (a, other)))
    assert finding.kind == "other_responses"
    assert "one tokenizer" in finding.evidence[0]


def test_prompt_first_and_last_tokens_and_padding_of_one_side(tmp_path: Path) -> None:
    samples = sampled(SEED)
    a, b = clean()
    rng = np.random.default_rng(0)
    cases = {
        "prompt": (a, [Row(s.prompt + s.response, np.concatenate([rng.normal(-3, 1, 6), s.rollout])) for s in samples]),
        "bos": ([Row([2, *r.ids], np.append(-1.0, r.logprobs)) for r in a], b),
        "end_token": (a, [Row([*r.ids, 1], np.append(r.logprobs, -0.1)) for r in b]),
        "padding": (
            a,
            [Row(r.ids + [0] * (3 + i % 5), np.append(r.logprobs, [0.0] * (3 + i % 5))) for i, r in enumerate(b)],
        ),
    }
    for kind, rows in cases.items():
        result = meter(tmp_path, rows)
        assert only(result).kind == kind
        assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(floor()), kind
        assert len(result.misaligned) == 20


def test_padding_of_one_side_is_one_finding(tmp_path: Path) -> None:
    a, b = clean()
    short = [3 + i % (NEW_TOKENS - 3) for i in range(len(a))]
    b = [Row(r.ids[:n], r.logprobs[:n]) for r, n in zip(b, short, strict=True)]

    def padded(left: bool) -> list[Row]:
        rows = []
        for r, n in zip(a, short, strict=True):
            pads, fill = [0] * (NEW_TOKENS - n), np.full(NEW_TOKENS - n, -3.5)
            ids, values = r.ids[:n], r.logprobs[:n]
            parts = ((pads, fill), (ids, values)) if left else ((ids, values), (pads, fill))
            rows.append(Row(parts[0][0] + parts[1][0], np.concatenate([parts[0][1], parts[1][1]])))
        return rows

    for left in (True, False):
        result = meter(tmp_path, (padded(left), b))
        assert only(result).title == "A counts padding"
        assert result.figures.tokens == sum(short)


@pytest.mark.parametrize("side", ["A", "B"])
def test_the_prompt_on_both_sides(tmp_path: Path, side: str) -> None:
    rng = np.random.default_rng(0)
    a, b = [], []
    for i, s in enumerate(sampled(SEED)):
        size = 3 + i % 4
        front, zeros = rng.normal(-3, 1, size), np.zeros(size)
        ids = s.prompt[:size] + s.response
        a.append(Row(ids, np.concatenate([front if side == "B" else zeros, s.trainer()])))
        b.append(Row(ids, np.concatenate([zeros if side == "B" else front, s.rollout])))
    result = meter(tmp_path, (a, b))
    finding = only(result)
    assert (finding.kind, finding.values["side"]) == ("prompt", side)
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(floor())


def test_a_prompt_is_found_without_token_ids(tmp_path: Path) -> None:
    def line(values: np.ndarray) -> str:
        return f'{{"logprobs": {values.tolist()}}}\n'

    rng = np.random.default_rng(0)
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text("".join(line(s.trainer()) for s in sampled(SEED)))
    b.write_text("".join(line(np.concatenate([rng.normal(-3, 1, 6), s.rollout])) for s in sampled(SEED)))
    result = meter_traces(TraceRequest(a, b))
    assert only(result).kind == "prompt"
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] == pytest.approx(floor())


def test_padding_on_both_sides(tmp_path: Path) -> None:
    a, b = clean()
    rng = np.random.default_rng(0)
    real = [5 + i % (NEW_TOKENS - 5) for i in range(len(a))]
    padded = [
        (
            Row(x.ids[:n] + [0] * (NEW_TOKENS - n), np.append(x.logprobs[:n], rng.normal(-5, 1, NEW_TOKENS - n))),
            Row(y.ids[:n] + [0] * (NEW_TOKENS - n), np.append(y.logprobs[:n], np.zeros(NEW_TOKENS - n))),
        )
        for x, y, n in zip(a, b, real, strict=True)
    ]
    result = meter(tmp_path, ([x for x, _ in padded], [y for _, y in padded]))
    assert only(result).kind == "padding"
    assert result.figures.metrics["mismatch/logprob_abs_diff_mean"] < 2 * floor()
    # With the mask, there is nothing to find.
    for (x, y), n in zip(padded, real, strict=True):
        x.extra = y.extra = {"response_mask": [1] * n + [0] * (NEW_TOKENS - n)}
    masked = meter(tmp_path, ([x for x, _ in padded], [y for _, y in padded]))
    assert masked.findings == ()
    assert masked.figures.tokens == sum(real)


def test_unrelated_log_probs(tmp_path: Path) -> None:
    a, b = clean()
    rng = np.random.default_rng(0)
    finding = only(meter(tmp_path, (a, [Row(r.ids, rng.normal(-8, 2, len(r.ids))) for r in b])))
    assert finding.kind == "unrelated"
    assert any("not shifted before the gather" in sentence for sentence in finding.evidence)


def test_wrong_labels_of_the_real_model_are_unrelated(tmp_path: Path) -> None:
    samples = sampled(SEED)
    wrong = [Row(s.response, pick(s.logits, [s.prompt[-1], *s.response[:-1]])) for s in samples]
    finding = only(meter(tmp_path, (wrong, rollout_rows(samples))))
    assert finding.kind == "unrelated"
