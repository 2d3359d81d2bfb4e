"""The engine over the kernels against the engine in plain torch, and against itself under interruptions.

Most tests run the kernels' references, so that what is tested is everything around them; one runs Triton itself, under
its interpreter unless there is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_case import dense, engine, moe, requests
from tiny import tiny_weights
from tracefp4.errors import TracefpError
from tracefp4.guidance import full_bits, row_bytes
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.recipe import QuantRecipe, quantize_expert_weights
from tracefp4.rollout.config import RolloutConfig, resolve
from tracefp4.rollout.decode import DecodeRunner, buckets
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.weights import tensors_of
from tracefp4.types import GuidanceHandle, Request, SamplingParams, Trajectory

WIDTHS = {"expert_input": 128, "key": 128, "value": 128}


def record(made: RolloutEngine, handle: GuidanceHandle | None) -> TrajectoryGuidance:
    assert handle is not None
    return made.store.get(handle)


def drain(made: RolloutEngine) -> dict[str, Trajectory]:
    done = []
    while made.scheduler.unfinished:
        done += made.step()
    return {t.request_id: t for t in done}


def different(a: TrajectoryGuidance, b: TrajectoryGuidance, site: str, layer: int, rows: slice = slice(None)) -> float:
    x, y = a.sites[site].payload[layer, rows], b.sites[site].payload[layer, rows]
    return float((x != y).float().mean())


def runner(made: RolloutEngine) -> DecodeRunner:
    assert made.kernels is not None
    return made.kernels.runner


# -- against the torch backend --------------------------------------------------------------------------------------


def near(a: Trajectory, b: Trajectory, atol: float) -> int:
    """Log-probs up to the first token that differs, if any (nearby distributions may draw another one); how many."""
    same = [x == y for x, y in zip(a.response_ids, b.response_ids, strict=False)]
    n = same.index(False) if False in same else len(same)
    assert (a.logprobs[:n] - b.logprobs[:n]).abs().amax() < atol if n else True
    return n


@pytest.mark.parametrize("shape", ["moe", "dense layer", "dense"])
def test_bf16_stays_near_the_torch_backend(shape: str) -> None:
    """BF16 engines differ by roundings: a few 2^-8 of logits of size 1 to 4."""
    config = {"moe": moe(), "dense layer": moe(mlp_only_layers=[0]), "dense": dense()}[shape]
    want = engine("bf16", "torch", config).generate(requests(6, max_new_tokens=6))
    got = engine("bf16", "references", config).generate(requests(6, max_new_tokens=6))
    compared = 0
    for a, b in zip(got, want, strict=True):
        compared += near(a, b, 0.04)
        assert (a.routed_experts is None) == (b.routed_experts is None) == (shape == "dense")
    assert compared > 24


def test_records_equal_the_torch_backends_where_arithmetic_does() -> None:
    """K and V of the first layer follow from the embedding by the same roundings: equal bytes. What lies behind an
    attention differs by its roundings."""
    a, b = engine("trace-all", "torch"), engine("trace-all", "references")
    for x, y in zip(a.generate(requests(6)), b.generate(requests(6)), strict=True):
        r, s = record(a, x.guidance), record(b, y.guidance)
        n = len(x.prompt_ids)
        assert torch.equal(r.token_ids[:n], s.token_ids[:n])
        assert (s.layers, s.bits, s.recipe_hash) == (r.layers, r.bits, r.recipe_hash)
        assert s.valid.all()
        for site in ("key", "value"):
            assert different(r, s, site, 0, slice(n)) == 0
            assert torch.equal(r.sites[site].encode_scale, s.sites[site].encode_scale)  # type: ignore[arg-type]
        assert different(r, s, "expert_input", 0, slice(n)) < 0.2
        for site, width in WIDTHS.items():
            assert s.sites[site].payload.shape == (2, y.num_rows, row_bytes("nvfp4", 1.125, width))
            assert (s.sites[site].payload != 0).any(-1).all()


@pytest.mark.parametrize("method", ["bf16", "trace-all"])
def test_triton_equals_its_references(method: str) -> None:
    """One layer, a prompt and a token: prefill, then decode in a bucket. A code that falls to the other side of a
    boundary, because sums ran in another order, moves the logits behind it."""
    pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
    config = moe(num_hidden_layers=1)
    ask = requests(2, max_new_tokens=2, max_prompt=4)
    got, want = (engine(method, name, config) for name in ("triton", "references"))
    for a, b in zip(got.generate(ask), want.generate(ask), strict=True):
        assert near(a, b, 0.02 if method == "bf16" else 0.2) >= 1
        assert a.routed_experts is not None
        assert b.routed_experts is not None
        assert (a.routed_experts != b.routed_experts).float().mean() < 0.1
        if method == "trace-all":
            r, s = record(got, a.guidance), record(want, b.guidance)
            rows = slice(len(a.prompt_ids) + 1)  # the sampled token's too: the first one is the same
            assert different(r, s, "key", 0, rows) < 0.01
            assert different(r, s, "value", 0, rows) < 0.01
            assert different(r, s, "expert_input", 0, rows) < 0.2


# -- against itself -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> tuple[RolloutEngine, dict[str, Trajectory]]:
    made = engine("trace-all", "references", max_num_seqs=8)
    return made, {t.request_id: t for t in made.generate(requests(8, max_new_tokens=8))}


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_tokens_per_step": 1},
        {"max_tokens_per_step": 5},
        {"max_num_seqs": 1},
        {"max_num_seqs": 3},
        {"page_size": 32},
    ],
    ids=str,
)
def test_sizes_change_nothing_beyond_rounding(
    sizes: dict[str, int], plain: tuple[RolloutEngine, dict[str, Trajectory]]
) -> None:
    """Decode and prefill round attention differently; rows stay where they belong all the same."""
    settings = {"max_num_seqs": 8, **sizes}
    for t, want in zip(
        engine("bf16", "references", **settings).generate(requests(4)),
        engine("bf16", "references").generate(requests(4)),
        strict=True,
    ):
        near(t, want, 0.06)
    made = engine("trace-all", "references", **settings)
    for t in made.generate(requests(8, max_new_tokens=2)):
        want = plain[1][t.request_id]
        r, s = record(made, t.guidance), record(plain[0], want.guidance)
        for site in ("key", "value"):
            assert different(r, s, site, 0, slice(len(t.prompt_ids))) < 0.005
    assert made.blocks.num_free == made.blocks.num_pages


def test_a_response_does_not_depend_on_the_others() -> None:
    """Bit for bit in FP32 sums: on the CPU a row's products do not depend on how many rows there are."""
    together = engine("bf16", "references").generate(requests(4, max_new_tokens=6))
    for r, want in zip(requests(4), together, strict=True):
        (t,) = engine("bf16", "references", max_num_seqs=1).generate([r])
        near(t, want, 0.04)


def test_preemption_marks_its_rows() -> None:
    made = engine("trace-all", "references", num_pages=5)
    ask = requests(4, min_prompt=12, max_prompt=14, max_new_tokens=12)
    for r in ask:
        made.add_request(r)
    again: dict[str, int] = {}
    done: dict[str, Trajectory] = {}
    while made.scheduler.unfinished:
        live = list(made._by_id.values())
        done |= {t.request_id: t for t in made.step()}
        again |= {s.request.request_id: s.num_recomputed for s in live}
    assert made.scheduler.num_preemptions > 0
    assert sum(n > 0 for n in again.values()) > 0
    for name, t in done.items():
        n = again[name]
        r = record(made, t.guidance)
        assert r.valid.tolist() == [False] * n + [True] * (t.num_rows - n)
        assert r.token_ids.tolist() == list(t.token_ids[:-1])
        assert t.routed_experts is not None
        assert (t.routed_experts[:n] == -1).all()
        assert (t.routed_experts[n:] >= 0).all()
    assert made.blocks.num_free == 5


def test_abort_returns_its_own_rows_and_no_one_elses(plain: tuple[RolloutEngine, dict[str, Trajectory]]) -> None:
    made = engine("trace-all", "references", max_num_seqs=8)
    for r in requests(8, max_new_tokens=8):
        made.add_request(r)
    for _ in range(4):
        made.step()
    t = made.abort("r2")
    assert t.finish_reason == "abort"
    assert t.response_ids == plain[1]["r2"].response_ids[: len(t.response_ids)]
    assert len(t.response_ids) == 4
    r = record(made, t.guidance)
    assert r.token_ids.tolist() == list(t.token_ids[:-1])
    want = record(plain[0], plain[1]["r2"].guidance)
    for site in WIDTHS:
        assert torch.equal(r.sites[site].payload, want.sites[site].payload[:, : t.num_rows])
    rest = drain(made)
    assert set(rest) == {f"r{i}" for i in range(8)} - {"r2"}
    for name, other in rest.items():
        near(other, plain[1][name], 0.5)
        assert record(made, other.guidance).rows == other.num_rows
    with pytest.raises(TracefpError, match="r2 is not in the engine"):
        made.abort("r2")


def test_turns_go_on_from_the_cache() -> None:
    made, turns = engine("trace-all", "references"), []

    def environment(request_id: str, turn: tuple[int, ...]) -> Sequence[int] | None:
        turns.append(turn)
        return [10, 11, 12] if len(turns) == 1 else None

    stop = tuple(range(1, 12))
    (t,) = made.generate(
        [Request("a", (3, 4, 5), SamplingParams(max_new_tokens=24, stop_token_ids=stop))], on_turn=environment
    )
    assert t.sampled is not None
    assert (~t.sampled).sum() == 3
    r = record(made, t.guidance)
    assert r.token_ids.tolist() == list(t.token_ids[:-1])
    assert r.valid.all()
    assert all((r.sites[site].payload != 0).any(-1).all() for site in WIDTHS)


@pytest.mark.parametrize(("n", "every"), [(4, 2), (11, 3)])
def test_probes_keep_full_codes_of_the_same_slots(n: int, every: int) -> None:
    """The low planes of a full record are the run's own record: both were made of one rounding. Eleven: rows come and
    go, and move."""
    made = engine("trace-all", "references")
    done = made.generate(requests(n, probe_every=every))
    assert [t.probe is not None for t in done] == [i % every == 0 for i in range(n)]
    for t in done[::every]:
        own, probe = record(made, t.guidance), record(made, t.probe)
        assert (probe.bits, probe.layers) == (full_bits("nvfp4"), (0, 1))
        for site in WIDTHS:
            plane = WIDTHS[site] // 8
            assert torch.equal(own.sites[site].payload[..., :plane], probe.sites[site].payload[..., :plane])
            for bit in range(2):
                a = own.sites[site].payload[..., plane + bit : plane + bit + 1]
                b = probe.sites[site].payload[..., 4 * plane + bit : 4 * plane + bit + 1]
                assert torch.equal(a, b)


def test_prompts_of_one_length_are_prefilled_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls as lengths, a layer, wherever the prompts stand; and the tokens of prompts that run alone."""
    prompts = [(3, 4, 5, 6, 7)] * 3 + [(8, 9)] + [(3, 4, 5, 6, 7)]
    ask = [Request(f"r{i}", p, SamplingParams(0.0, max_new_tokens=3)) for i, p in enumerate(prompts)]
    alone = [engine("bf16", "references").generate([r])[0] for r in ask]
    made, calls, plain = engine("bf16", "references", max_num_seqs=5), [], F.scaled_dot_product_attention

    def counted(q: Tensor, *rest: Any, **more: Any) -> Tensor:
        calls.append(len(q))
        return plain(q, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    for a, b in zip(made.generate(ask), alone, strict=True):
        assert near(a, b, 0.02) >= 1
    assert calls == [1, 4] * 2


def test_w4a16_and_unquantized_parts_run() -> None:
    for quant in ({"activations": "none"}, {"kv": "none"}, {"weights": "none", "activations": "none"}):
        a, b = engine("naive", "torch", quant=quant), engine("naive", "references", quant=quant)
        for x, y in zip(a.generate(requests(3)), b.generate(requests(3)), strict=True):
            near(x, y, 0.5)


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["bf16", "trace-all"])
def test_an_update_keeps_every_tensor_in_place(method: str) -> None:
    backend = "references"
    made, config = engine(method, backend), moe()
    before = [t.data_ptr() for t in made.model.weight_tensors]
    made.update_weights(tiny_weights(config, seed=1).items(), 1)
    assert [t.data_ptr() for t in made.model.weight_tensors] == before
    fresh = engine(method, backend, load=False)
    fresh.update_weights(tiny_weights(config, seed=1).items(), 1)
    for a, b in zip(made.model.weight_tensors, fresh.model.weight_tensors, strict=True):
        assert torch.equal(a, b)
    for x, y in zip(made.generate(requests(3)), fresh.generate(requests(3)), strict=True):
        assert x.response_ids == y.response_ids
        assert torch.equal(x.logprobs, y.logprobs)


@pytest.mark.parametrize("backend", ["torch", "references"])
def test_a_refused_update_writes_nothing(backend: str) -> None:
    made, config = engine("trace-all", backend), moe()
    before = [t.clone() for t in made.model.weight_tensors]
    good = tiny_weights(config, seed=5)
    last = "model.layers.1.mlp.experts.down_proj"
    for bad in ({**good, last: good[last] * torch.nan}, {k: v for k, v in good.items() if k != last}):
        with pytest.raises(TracefpError, match=last):
            made.update_weights(bad.items(), 1)
    assert made.version == 0
    assert all(torch.equal(a, b) for a, b in zip(made.model.weight_tensors, before, strict=True))


def test_an_update_that_breaks_off_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    made, config = engine("trace-all", "references"), moe()
    build = made.model._load_layer

    def broken(i: int, take: Any) -> Any:
        if i == 1:
            raise RuntimeError("out of memory")
        return build(i, take)

    monkeypatch.setattr(made.model, "_load_layer", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        made.update_weights(tiny_weights(config, seed=1).items(), 1)
    made.add_request(requests(1)[0])
    with pytest.raises(TracefpError, match="broke off halfway; call update_weights again"):
        made.step()
    monkeypatch.undo()
    made.update_weights(tiny_weights(config, seed=1).items(), 1)
    fresh = engine("trace-all", "references", load=False)
    fresh.update_weights(tiny_weights(config, seed=1).items(), 1)
    (a,) = drain(made).values()
    (b,) = fresh.generate(requests(1))
    assert torch.equal(a.logprobs, b.logprobs)


def test_experts_packed_a_few_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = engine("trace-all", "references")
    monkeypatch.setattr("tracefp4.rollout.kernel_model.PACK_VALUES", 3 * 256 * 128)
    parts = engine("trace-all", "references")
    for a, b in zip(tensors_of(whole.model._layers), tensors_of(parts.model._layers), strict=True):
        assert torch.equal(a, b)


# -- the decode runner ----------------------------------------------------------------------------------------------


def test_buckets_grow_and_end_at_the_most() -> None:
    assert buckets(1) == [1]
    assert buckets(3) == [1, 2, 3]
    assert buckets(24) == [1, 2, 4, 8, 16, 24]
    assert buckets(100)[-4:] == [64, 80, 96, 100]
    assert buckets(600)[-3:] == [512, 576, 600]
    for most in range(1, 700, 13):
        sizes = buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most


def state(made: RolloutEngine) -> list[Tensor]:
    assert made.kernels is not None
    scratch = made.kernels.pool.scratch_page
    return [t[:scratch] for cache in made.kernels.pool.layers for t in cache.tensors]


def test_padding_rows_touch_nothing_and_change_no_one() -> None:
    """Three sequences in a bucket of eight and in one of three: equal tokens, log-probs, cache and records."""
    runs = []
    for sizes in ([8], [3]):
        made = engine("trace-all", "references", max_num_seqs=8)
        runner(made).buckets = [*sizes, 8]
        done = made.generate(requests(3, max_new_tokens=6))
        runs.append((made, done))
    (a, x), (b, y) = runs
    for t, u in zip(x, y, strict=True):
        assert t.response_ids == u.response_ids
        assert torch.equal(t.logprobs, u.logprobs)
        assert record(a, t.guidance).checksum() == record(b, u.guidance).checksum()
        assert torch.equal(t.routed_experts, u.routed_experts)  # type: ignore[arg-type]
    assert all(torch.equal(s, t) for s, t in zip(state(a), state(b), strict=True))
    written = [s.flatten(1).any(1).sum() for s in state(a)]
    assert all(int(n) <= 3 * 2 for n in written), "two pages a sequence at most"


def test_steps_send_nothing_while_the_batch_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("bf16", "references")
    for r in requests(3, max_new_tokens=8):
        made.add_request(r)
    made.step()
    made.step()
    run, sent = runner(made), []
    for name in ("tokens", "positions", "tables"):
        buffer = getattr(run, name)
        monkeypatch.setattr(run, name, Watched(buffer, sent, name))
    for _ in range(3):
        made.step()
    assert sent == []


class Watched:
    """A buffer that notes when the host writes all of it."""

    def __init__(self, tensor: Tensor, notes: list[str], name: str) -> None:
        self._tensor, self._notes, self._name = tensor, notes, name

    def copy_(self, *_: Any, **__: Any) -> None:
        self._notes.append(self._name)

    def __getitem__(self, index: Any) -> Any:
        part = self._tensor[index]
        return part if self._name != "tables" else WatchedPart(part, self._notes)


class WatchedPart(torch.Tensor):
    @staticmethod
    def __new__(cls, tensor: Tensor, notes: list[str]) -> WatchedPart:
        made: WatchedPart = torch.Tensor._make_subclass(cls, tensor)
        made.notes = notes  # type: ignore[attr-defined]
        return made

    def copy_(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        self.notes.append("tables")  # type: ignore[attr-defined]


def run_with(ahead: bool, event: str, burst: int = 1) -> tuple[RolloutEngine, dict[str, Trajectory]]:
    """The same run, launching ahead or not, with something happening in its middle."""
    pages = {"num_pages": 4} if event == "preemption" else {}
    made = engine("trace-all", "references", max_num_seqs=3, steps_per_sync=burst, **pages)
    runner(made).ahead = ahead
    for r in requests(5, min_prompt=9, max_prompt=14, max_new_tokens=12, stop=event == "stop"):
        made.add_request(r)
    done = []
    for step in range(200):
        if step == 5 and event == "update":
            made.update_weights(tiny_weights(moe(), seed=1).items(), 1)
        if step == 5 and event == "abort":
            done.append(made.abort("r1"))
        if step == 6 and event == "request":
            made.add_request(Request("new", (3, 4, 5), SamplingParams(max_new_tokens=9, top_p=0.9, seed=8)))
        done += made.step()
        if not made.scheduler.unfinished:
            break
    return made, {t.request_id: t for t in done}


@pytest.mark.parametrize("event", ["nothing", "stop", "update", "abort", "request", "preemption"])
def test_a_step_launched_ahead_changes_nothing(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = DecodeRunner._launch
    monkeypatch.setattr(DecodeRunner, "_launch", lambda self, n: (launched.append(self.ahead), launch(self, n))[1])
    a, want = run_with(False, event)
    b, got = run_with(True, event)
    assert launched.count(True) >= launched.count(False), "dropped steps come on top"
    same_runs(a, want, b, got)
    assert (b.scheduler.num_preemptions > 0) == (event == "preemption")


def same_runs(a: RolloutEngine, want: dict[str, Trajectory], b: RolloutEngine, got: dict[str, Trajectory]) -> None:
    """Bit for bit, records included, and all pages free."""
    assert set(got) == set(want)
    for name, t in got.items():
        u = want[name]
        assert t.response_ids == u.response_ids
        assert t.finish_reason == u.finish_reason
        assert torch.equal(t.logprobs, u.logprobs)
        assert torch.equal(t.versions, u.versions)
        assert torch.equal(t.row_versions, u.row_versions)
        assert record(b, t.guidance).checksum() == record(a, u.guidance).checksum()
        assert (t.probe is None) == (u.probe is None)
        if t.probe is not None:
            assert record(b, t.probe).checksum() == record(a, u.probe).checksum()
    assert b.blocks.num_free == b.blocks.num_pages


@pytest.mark.parametrize("event", ["nothing", "stop"])
@pytest.mark.parametrize(("burst", "ahead"), [(2, False), (5, True), (16, True)])
def test_a_burst_draws_what_single_steps_draw(burst: int, ahead: bool, event: str) -> None:
    """Stop tokens fall into the middle of bursts, and bursts end where a row may not go on."""
    same_runs(*run_with(False, event), *run_with(ahead, event, burst))


def test_bursts_end_before_pages_do() -> None:
    made, done = run_with(True, "preemption", 8)
    want = run_with(False, "preemption")[1]
    assert {n: len(t.response_ids) for n, t in done.items()} == {n: len(t.response_ids) for n, t in want.items()}
    assert all(len(t.row_versions) == t.num_rows and (t.row_versions == 0).all() for t in done.values())
    assert made.blocks.num_free == made.blocks.num_pages


def test_turns_and_probes_in_bursts() -> None:
    """The host's answer comes when the device is already past it; rows that are probed keep their records."""

    def run(burst: int) -> tuple[RolloutEngine, dict[str, Trajectory]]:
        made = engine("trace-all", "references", max_num_seqs=4, steps_per_sync=burst)
        plain = requests(6, min_prompt=4, max_prompt=9, max_new_tokens=24, probe_every=2)
        asked = [replace(q, sampling=replace(q.sampling, stop_token_ids=tuple(range(1, 9)))) for q in plain]
        turns = dict[str, int]()

        def answer(name: str, turn: tuple[int, ...]) -> list[int] | None:
            turns[name] = turns.get(name, 0) + 1
            return [5, 6, 7][: 1 + turns[name] % 3] if turns[name] < 3 else None

        done = made.generate(asked, on_turn=answer)
        assert max(turns.values()) > 1
        return made, {t.request_id: t for t in done}

    same_runs(*run(1), *run(6))


def test_steps_in_a_row_depend_on_the_size_of_the_model() -> None:
    shape, recipe = engine("bf16", "references").shape, QuantRecipe(2)
    config = RolloutConfig(backend="triton")
    assert resolve(config, "cpu", shape, recipe).steps_per_sync == 1
    assert resolve(config, "cuda", shape, recipe).steps_per_sync == 8
    assert resolve(config, "cuda", replace(shape, layers=9000), recipe).steps_per_sync == 4
    assert resolve(RolloutConfig(backend="triton", steps_per_sync=3), "cpu", shape, recipe).steps_per_sync == 3


def test_steps_really_are_launched_ahead() -> None:
    made = engine("bf16", "references")
    run = runner(made)
    run.ahead = True
    for r in requests(2, max_new_tokens=20):
        made.add_request(r)
    flying = []
    while made.scheduler.unfinished:
        made.step()
        flying.append(run._flying)
    assert sum(flying) >= 16, "across page borders too"
    assert not flying[-1]


def test_rows_keep_their_place_when_others_leave() -> None:
    made = engine("bf16", "references", max_num_seqs=8)
    seqs = [object() for _ in range(6)]
    run = runner(made)
    run._rows, run._row_of = seqs[:4], {id(s): i for i, s in enumerate(seqs[:4])}  # type: ignore[assignment]
    assert run.order([seqs[0], seqs[2], seqs[3]]) == [seqs[0], seqs[3], seqs[2]]  # type: ignore[list-item]
    assert run.order([seqs[1], seqs[4], seqs[3], seqs[5]]) == [seqs[4], seqs[1], seqs[5], seqs[3]]  # type: ignore[list-item]
    assert run.order([seqs[5]]) == [seqs[5]]  # type: ignore[list-item]
    assert run.order(seqs) == seqs  # type: ignore[arg-type]


def test_logits_that_are_not_finite_stop_the_step_and_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    want = {t.request_id: t for t in engine("bf16", "references").generate(requests(3))}
    made = engine("bf16", "references")
    for r in requests(3):
        made.add_request(r)
    for _ in range(2):
        made.step()
    forward = made.model.run  # type: ignore[attr-defined]
    monkeypatch.setattr(made.model, "run", lambda *a: forward(*a) * torch.nan)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="not finite"):
            made.step()
    monkeypatch.undo()
    done = drain(made)
    assert {n: t.response_ids for n, t in done.items()} == {n: t.response_ids for n, t in want.items()}
    assert all(torch.equal(t.logprobs, want[n].logprobs) for n, t in done.items())


def test_top_p_and_greedy_share_a_batch() -> None:
    ask = [
        Request(f"r{i}", (3, 4, 5), SamplingParams(temperature=t, top_p=p, max_new_tokens=5, seed=i))
        for i, (t, p) in enumerate([(0.0, 1.0), (1.0, 0.5), (0.7, 1.0), (1.0, 1.0)])
    ]
    together = engine("bf16", "references").generate(ask)
    for r, want in zip(ask, together, strict=True):
        (alone,) = engine("bf16", "references").generate([r])
        assert alone.response_ids == want.response_ids


def test_what_ended_is_handed_out_though_the_rest_is_aborted() -> None:
    """Trajectories are made in the step after the one in which they end; the last ones of all at once."""
    made = engine("trace-all", "references")
    short, long, other = requests(3, max_new_tokens=12)
    short = replace(short, sampling=replace(short.sampling, max_new_tokens=2))
    for r in (short, long, other):
        made.add_request(r)
    assert made.step() == made.step() == []
    assert made.scheduler.unfinished == 2
    aborted = [made.abort(r.request_id) for r in (long, other)]
    assert [t.finish_reason for t in aborted] == ["abort"] * 2
    assert made.scheduler.unfinished == 0
    assert made.busy
    (ended,) = made.step()
    assert (ended.request_id, ended.finish_reason, len(ended.response_ids)) == (short.request_id, "length", 2)
    assert record(made, ended.guidance).valid.all()
    assert not made.busy
    with pytest.raises(TracefpError, match="is not in the engine"):
        made.abort(short.request_id)


def test_a_group_is_aborted_whole_though_one_of_it_has_ended() -> None:
    made = engine("bf16", "references")
    short, long = requests(2, max_new_tokens=12)
    short = replace(short, sampling=replace(short.sampling, max_new_tokens=2))
    for r in (short, long):
        made.add_request(r)
    made.step()
    made.step()
    reasons = [made.abort(r.request_id).finish_reason for r in (long, short)]
    assert reasons == ["abort", "length"]
    assert not made.busy


def test_replaced_experts_lie_where_captured_steps_read_them() -> None:
    """Weights of a quantizer that saw more: in place, used by the next response, gone with the next update."""
    made = {backend: engine("qat", backend) for backend in ("torch", "references")}
    before = made["references"].generate(requests(4, max_new_tokens=4))
    model = made["references"].model
    held = {part: list(tensors_of(getattr(model._layers[1], part))) for part in ("gate_up", "down")}
    weights = dict(tiny_weights(moe()))
    for part in ("gate_up", "down"):
        w = weights[f"model.layers.1.mlp.experts.{part}_proj"]
        halved = quantize_expert_weights(0.5 * w, "nvfp4", True)
        for one in made.values():
            one.model.replace_experts(1, part, halved)
        now = list(tensors_of(getattr(model._layers[1], part)))
        assert [t.data_ptr() for t in now] == [t.data_ptr() for t in held[part]]
    ours, theirs = (made[b].generate(requests(4, max_new_tokens=4)) for b in ("references", "torch"))
    assert sum(near(a, b, 0.5) for a, b in zip(ours, theirs, strict=True)) >= 8
    assert any(not torch.equal(a.logprobs, b.logprobs) for a, b in zip(ours, before, strict=True))
    made["references"].update_weights(weights.items(), 1)
    for a, b in zip(made["references"].generate(requests(4, max_new_tokens=4)), before, strict=True):
        assert torch.equal(a.logprobs, b.logprobs)
