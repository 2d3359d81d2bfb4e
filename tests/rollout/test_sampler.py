"""Sampling: its uniform numbers, the kept set, frequencies, log-probs, and what it refuses."""

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor

from tracefp4.rollout import sampler
from tracefp4.rollout.sampler import SamplingTensors, _nucleus, counter_uniform, row_blocks, sample
from tracefp4.types import SamplingParams


def ks_distance(u: Tensor) -> float:
    u = u.sort().values
    n = len(u)
    at = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum((at[1:] - u).max(), (u - at[:-1]).max()))


@pytest.mark.parametrize("along", ["counter", "seed", "far seeds", "negative seeds"])
def test_counter_uniform_is_uniform(along: str) -> None:
    n = 20000
    i = torch.arange(n)
    seeds, counters = {
        "counter": (torch.full((n,), 7), i),
        "seed": (i, torch.full((n,), 3)),
        "far seeds": (i << 40, torch.full((n,), 3)),
        "negative seeds": (-i * 12345678901, i % 5),
    }[along]
    u = counter_uniform(seeds, counters)
    assert u.dtype == torch.float64
    assert 0 <= float(u.min()) <= float(u.max()) < 1
    # Kolmogorov-Smirnov: exceeded once in 1e5 by a uniform sequence (Massart: 2 exp(-2 n d^2)).
    assert ks_distance(u) < math.sqrt(math.log(2e5) / (2 * n))
    # Neighbours are independent: the correlation of n pairs has a standard deviation of 1/sqrt(n).
    assert abs(float(torch.corrcoef(torch.stack([u[1:], u[:-1]]))[0, 1])) < 4.5 / math.sqrt(n)


def test_counter_uniform_has_no_early_collisions() -> None:
    seeds, counters = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
    u = counter_uniform(seeds, counters)
    assert len(u.unique()) == u.numel()
    assert torch.equal(counter_uniform(seeds[3:5], counters[3:5]), u[3:5])


def draw(logits: Tensor, n: int, **params: float) -> Tensor:
    """n tokens from one distribution: as many requests with seeds 0, 1, ..."""
    ids, _ = sample(logits.expand(n, -1), [SamplingParams(seed=i, **params) for i in range(n)], torch.full((n,), 9))
    return ids


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (2.0, 0.8)])
def test_frequencies_follow_the_distribution(temperature: float, top_p: float) -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.2, -0.4, 0.0]])
    p = torch.softmax(logits.double() / temperature, -1)
    if top_p < 1:
        p = _nucleus(p, torch.tensor([top_p], dtype=torch.float64))
        p = p / p.sum()
    n = 20000
    counts = torch.bincount(draw(logits, n, temperature=temperature, top_p=top_p), minlength=6).double()
    kept = p[0] > 0
    assert counts[~kept].sum() == 0
    expected = n * p[0, kept]
    chi2 = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi2 < 30.9  # the 1e-5 quantile at 5 degrees of freedom; fewer degrees lie below


def test_a_request_does_not_depend_on_its_batch() -> None:
    g = torch.Generator().manual_seed(0)
    V, B = 50, 12
    logits = torch.randn(B, V, generator=g) * 4
    params = [
        SamplingParams(temperature=(0.0, 0.5, 1.0)[i % 3], top_p=(1.0, 0.9, 0.5, 1.0)[i % 4], seed=i) for i in range(B)
    ]
    positions = torch.arange(B) + 5
    ids, logprobs = sample(logits, params, positions)
    for i in range(B):
        alone = sample(logits[i : i + 1], params[i : i + 1], positions[i : i + 1])
        assert int(alone[0]) == int(ids[i])
        assert float(alone[1]) == float(logprobs[i])


def test_top_p_of_others_cuts_nothing_from_a_whole_distribution() -> None:
    """FP32 log-probs may sum to a little over 1 before the rarest token; top_p = 1 keeps it all the same."""
    p = torch.tensor([[0.6, 0.4 + 1e-7, 1e-9], [0.6, 0.4, 1e-9]], dtype=torch.float64)
    kept = _nucleus(p, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert torch.equal(kept[0], p[0])
    assert (kept[1] > 0).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, [0]),  # reached exactly: nothing more
        ([0.5, 0.25, 0.125, 0.125], 0.51, [0, 1]),
        ([0.125, 0.25, 0.5, 0.125], 0.75, [1, 2]),
        ([0.25, 0.25, 0.25, 0.25], 0.5, [0, 1]),  # of equals the first ones
        ([0.125, 0.5, 0.125, 0.25], 0.875, [0, 1, 3]),
        ([0.5, 0.25, 0.125, 0.125], 1.0, [0, 1, 2, 3]),
        ([0.5, 0.25, 0.125, 0.125], 1e-9, [0]),  # at least one
    ],
)
def test_nucleus_keeps_the_smallest_sufficient_set(probs: list[float], top_p: float, kept: list[int]) -> None:
    p = torch.tensor([probs], dtype=torch.float64)
    out = _nucleus(p, torch.tensor([top_p], dtype=torch.float64))
    assert out[0].nonzero()[:, 0].tolist() == kept
    assert torch.equal(out[0, kept], p[0, kept])


def test_logprob_is_of_the_scaled_distribution_before_top_p() -> None:
    logits = torch.tensor([[0.3, -1.0, 2.0, 1.2]])
    for temperature, top_p in [(1.0, 1.0), (0.5, 1.0), (0.5, 0.3), (3.0, 0.6)]:
        (i,), (logprob,) = sample(logits, [SamplingParams(temperature, top_p, seed=4)], torch.tensor([2]))
        want = torch.log_softmax(logits.double() / temperature, -1)[0, i]
        assert abs(float(logprob) - float(want)) < 4e-7 * (1 + abs(float(want)))


def test_greedy_takes_the_first_maximum_at_temperature_one() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    (i,), (logprob,) = sample(logits, [SamplingParams(temperature=0, top_p=0.5)], torch.tensor([2]))
    assert i == 1
    assert math.isclose(float(logprob), float(torch.log_softmax(logits.double(), -1)[0, 1]), rel_tol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[1.0, 8.0, -math.inf, 7.9]])
    ids, logprobs = sample(logits, [SamplingParams(temperature=temperature, seed=1)], torch.tensor([2]))
    assert ids.tolist() == [1]
    assert logprobs.tolist() == [0.0]


def test_only_one_possible_token() -> None:
    logits = torch.full((64, 5), -math.inf)
    logits[:, 3] = -70.0
    ids, logprobs = sample(logits, [SamplingParams(seed=i) for i in range(64)], torch.arange(64))
    assert (ids == 3).all()
    assert (logprobs == 0).all()


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert set(draw(logits, 2000).tolist()) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
def test_broken_logits_raise(bad: float | str) -> None:
    logits = torch.zeros(3, 4)
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 2] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        sample(logits, [SamplingParams()] * 3, torch.arange(3))


def test_a_refusal_keeps_no_tensor_alive() -> None:
    logits = torch.full((1, 4), math.nan)
    kept = weakref.ref(logits)
    with pytest.raises(FloatingPointError) as error:
        sample(logits, [SamplingParams()], torch.arange(1))
    del logits, error
    gc.collect()
    assert kept() is None


def test_row_blocks_are_few_and_of_equal_size() -> None:
    for B in range(40):
        for limit in range(1, 45):
            blocks = row_blocks(B, 10, 3, limit * 30 + 29)
            rows = [at.stop - at.start for at in blocks]
            assert [i for at in blocks for i in range(B)[at]] == list(range(B))
            assert len(blocks) == max(1, math.ceil(B / limit))
            assert max(rows) <= limit
            assert set(rows[:-1]) <= {rows[0]}
            assert rows[-1] <= rows[0]
    assert row_blocks(3, 10, 3, 29) == [slice(0, 1), slice(1, 2), slice(2, 3)]  # a row that is too much by itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B", [1, 2, 11, 12])
def test_blocks_of_rows_draw_what_all_rows_draw_at_once(
    B: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows, whole distributions and tight cuts side by side; many tokens are equally likely."""
    V, g = 3001, torch.Generator().manual_seed(B)
    logits = (torch.randn(B, V, generator=g) * 3).to(dtype)
    logits[::2] = logits[::2].round()
    logits[:, 5:9] = -math.inf
    if B > 2:
        logits[2] = 1.0
        logits[3, 7] = math.nan
    temperatures, cuts = (1.0, 0.0, 0.5, 1e-20, 2.0), (0.9, 1.0, 0.5, 1e-9)
    params = [SamplingParams(temperatures[i % 5], cuts[i % 4], seed=i) for i in range(B)]
    settings, positions = SamplingTensors.of(params), torch.arange(B)
    logit = sampler.DRAW_LOGIT_BYTES * V
    monkeypatch.setattr(sampler, "DRAW_BYTES", B * logit)
    want = sampler.draw(logits, settings, positions, True)
    good = want[2]
    assert good.tolist() == [i != 3 or B <= 2 for i in range(B)]
    seen, alone = [], sampler._draw_by_top_p

    def noted(block: Tensor, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(len(block))
        return alone(block, *args)

    monkeypatch.setattr(sampler, "_draw_by_top_p", noted)
    for rows in (1, 2, 3, 4, 5, 7, 10, 11, 12, 13):
        seen.clear()
        monkeypatch.setattr(sampler, "DRAW_BYTES", rows * logit + logit // 2)
        got = sampler.draw(logits, settings, positions, True)
        assert max(seen) <= rows
        assert sum(seen) == B
        assert all(x.dtype == y.dtype for x, y in zip(got, want, strict=True))
        assert torch.equal(got[0][good], want[0][good])
        assert torch.equal(got[1][good], want[1][good])
        assert torch.equal(got[2], good)


def test_no_rows_draw_nothing() -> None:
    settings = SamplingTensors.of([SamplingParams(top_p=0.5)]).rows(slice(0))
    got = sampler.draw(torch.zeros(0, 7), settings, torch.zeros(0, dtype=torch.int64), True)
    assert [len(x) for x in got] == [0, 0, 0]
