"""The engine against transformers, and against itself under other chunks, pages, batches and interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny import make_engine, tiny_config, tiny_model, tiny_requests, tiny_weights
from tracefp4.errors import TracefpError
from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import CompactGuidance, GuidanceHeader, encode, full_bits, row_bytes
from tracefp4.guidance.codec import unpack_rows
from tracefp4.guidance.store import TrajectoryGuidance
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import GuidanceHandle, Request, SamplingParams, Trajectory

WIDTHS = {"expert_input": 64, "key": 64, "value": 64}


def record(engine: RolloutEngine, handle: GuidanceHandle | None) -> TrajectoryGuidance:
    assert handle is not None
    return engine.store.get(handle)


def by_id(trajectories: Sequence[Trajectory]) -> dict[str, Trajectory]:
    return {t.request_id: t for t in trajectories}


def drain(engine: RolloutEngine) -> dict[str, Trajectory]:
    done = []
    while engine.scheduler.unfinished:
        done += engine.step()
    return by_id(done)


def steps(engine: RolloutEngine, n: int) -> None:
    for _ in range(n):
        engine.step()


def full_blocks(engine: RolloutEngine, probe: TrajectoryGuidance, site: str, i: int) -> QuantizedBlocks:
    """The rollout's own blocks out of a full-width record."""
    name, data = str(engine.recipe.site_format(site)), probe.sites[site]
    rows, width = probe.rows, WIDTHS[site]
    assert data.encode_scale is not None
    S = data.encode_scale[i][:, None] if data.encode_scale.ndim else data.encode_scale
    header = GuidanceHeader("", name, probe.bits, (rows, width), get_format(name).block_size)
    codes, _, scales = unpack_rows(CompactGuidance(header, data.payload[i], S, probe.valid))
    return QuantizedBlocks(codes[:, ::2] | (codes[:, 1::2] << 4), scales, S, name, (rows, width))


# -- against transformers -------------------------------------------------------------------------------------------


def hf_logprobs(model: Any, t: Trajectory) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([t.token_ids])).logits[0].float()
    p = len(t.prompt_ids)
    return torch.log_softmax(logits, -1)[p - 1 : -1].gather(-1, torch.tensor(t.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": False},
        {"norm_topk_prob": False},
        {"mlp_only_layers": [0]},
        {"num_key_value_heads": 4},
    ],
    ids=str,
)
def test_fp32_logprobs_equal_transformers(overrides: dict[str, Any]) -> None:
    config = tiny_config(**overrides)
    engine, model = make_engine("bf16", "float32", config=config), tiny_model(config)
    for t in engine.generate(tiny_requests(6)):
        assert (t.logprobs - hf_logprobs(model, t)).abs().max() < 1e-5


def test_fp32_experts_equal_transformers() -> None:
    config = tiny_config()
    engine, model = make_engine("bf16", "float32", config=config), tiny_model(config)
    for t in engine.generate(tiny_requests(4)):
        with torch.no_grad():
            out = model(torch.tensor([t.token_ids[:-1]]), output_router_logits=True)
        own = torch.stack([x.topk(2, dim=-1).indices for x in out.router_logits], dim=1)
        assert t.routed_experts is not None
        assert t.routed_experts.dtype == torch.int16
        assert torch.equal(t.routed_experts.long().sort(-1).values, own.sort(-1).values)


def test_greedy_equals_transformers_generate() -> None:
    model = tiny_model(tiny_config())
    engine = make_engine("bf16", "float32")
    for t in engine.generate(tiny_requests(4, temperature=0.0, stop=True)):
        prompt = torch.tensor([t.prompt_ids])
        out = model.generate(prompt, max_new_tokens=16, do_sample=False, attention_mask=torch.ones_like(prompt))
        assert tuple(out[0, prompt.shape[1] :].tolist()) == t.response_ids


def test_bf16_stays_near_transformers() -> None:
    """Two BF16 engines differ by roundings only: a few 2^-8 of logits of size 1 to 4."""
    config = tiny_config()
    engine, model = make_engine("bf16", "bfloat16", config=config), tiny_model(config, "bfloat16")
    diffs = torch.cat([(t.logprobs - hf_logprobs(model, t)).abs() for t in engine.generate(tiny_requests(8))])
    assert 0 < diffs.mean() < 0.02


# -- against itself -------------------------------------------------------------------------------------------------

SIZES: list[dict[str, int]] = [
    {"max_tokens_per_step": 1},
    {"max_tokens_per_step": 7},
    {"page_size": 1},
    {"page_size": 5},
    {"max_num_seqs": 1},
    {"max_num_seqs": 3},
    {"page_size": 3, "max_tokens_per_step": 11, "max_num_seqs": 5},
]


@pytest.fixture(scope="module")
def plain() -> dict[str, Trajectory]:
    return by_id(make_engine("bf16", "float32").generate(tiny_requests(10)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_do_not_change_an_unquantized_rollout(sizes: dict[str, int], plain: dict[str, Trajectory]) -> None:
    for t in make_engine("bf16", "float32", **sizes).generate(tiny_requests(10)):
        want = plain[t.request_id]
        assert t.response_ids == want.response_ids
        assert (t.logprobs - want.logprobs).abs().max() < 1e-5
        assert t.routed_experts is not None
        assert want.routed_experts is not None
        assert torch.equal(t.routed_experts, want.routed_experts)


@pytest.fixture(scope="module")
def guided() -> tuple[RolloutEngine, dict[str, Trajectory]]:
    engine = make_engine("trace-all", "float32")
    return engine, by_id(engine.generate(tiny_requests(10)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_do_not_change_a_record(
    sizes: dict[str, int], guided: tuple[RolloutEngine, dict[str, Trajectory]]
) -> None:
    """Sums of another order move an FP32 value by 1e-7 of itself, so of 1e5 codes a stray one may fall on the other
    side; were a row misplaced, half of its bits would differ."""
    engine = make_engine("trace-all", "float32", **sizes)
    for t in engine.generate(tiny_requests(10)):
        want = guided[1][t.request_id]
        assert t.response_ids == want.response_ids
        a, b = record(engine, t.guidance), record(guided[0], want.guidance)
        assert torch.equal(a.token_ids, b.token_ids)
        assert a.valid.all()
        for site in WIDTHS:
            assert (a.sites[site].payload != b.sites[site].payload).float().mean() < 2e-3
        S, want_S = a.sites["expert_input"].encode_scale, b.sites["expert_input"].encode_scale
        assert S is not None
        assert want_S is not None
        assert (want_S != S).float().mean() < 2e-3


def test_a_response_does_not_depend_on_the_others(plain: dict[str, Trajectory]) -> None:
    for r in tiny_requests(10)[:4]:
        (t,) = make_engine("bf16", "float32").generate([r])
        assert t.response_ids == plain[r.request_id].response_ids


# -- rows and finish reasons ----------------------------------------------------------------------------------------


def check_contract(engine: RolloutEngine, t: Trajectory) -> None:
    rows = t.num_rows
    assert rows == len(t.token_ids) - 1
    assert t.logprobs.shape == t.versions.shape == (len(t.response_ids),)
    assert t.logprobs.dtype == torch.float32
    assert (t.logprobs <= 0).all()
    assert t.row_versions.shape == (rows,)
    assert t.routed_experts is not None
    assert t.routed_experts.shape == (rows, 2, 2)
    r = record(engine, t.guidance)
    assert r.rows == rows
    assert r.layers == (0, 1)
    assert r.token_ids.tolist() == list(t.token_ids[:-1])
    assert torch.equal(r.versions, t.row_versions)
    for site, width in WIDTHS.items():
        assert r.sites[site].payload.shape == (2, rows, row_bytes("nvfp4", 1.125, width))
        # Every row was written: rows of zeros would be those that nobody recorded, prompt rows included.
        assert (r.sites[site].payload != 0).any(-1).all()


def test_rows_are_tokens_minus_one_whatever_ends_a_response() -> None:
    engine = make_engine()
    all_stop = tuple(range(32))
    requests = [
        Request("stop at once", (4, 5, 6), SamplingParams(max_new_tokens=9, stop_token_ids=all_stop)),
        Request("one token", (4, 5, 6), SamplingParams(max_new_tokens=1)),
        Request("one token prompt", (4,), SamplingParams(max_new_tokens=1)),
        Request("stop and length", (4,), SamplingParams(max_new_tokens=1, stop_token_ids=all_stop)),
        Request("length", (4, 5), SamplingParams(max_new_tokens=12)),
        Request("full", (4,) * 20, SamplingParams(max_new_tokens=44)),
    ]
    done = engine.generate(requests)
    assert [t.request_id for t in done] == [r.request_id for r in requests]
    assert [t.finish_reason for t in done] == ["stop", "length", "length", "stop", "length", "length"]
    assert [len(t.response_ids) for t in done] == [1, 1, 1, 1, 12, 44]
    for t in done:
        check_contract(engine, t)
    assert engine.blocks.num_free == engine.blocks.num_pages


def test_a_stop_token_ends_the_response_and_is_kept() -> None:
    engine = make_engine()
    done = engine.generate(tiny_requests(40, max_new_tokens=40, stop=True))
    assert {t.finish_reason for t in done} == {"stop", "length"}
    for t in done:
        check_contract(engine, t)
        assert 1 not in t.response_ids[:-1]
        assert (t.response_ids[-1] == 1) == (t.finish_reason == "stop") or len(t.response_ids) == 40


# -- what is recorded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["trace-all", "trace", "trace-paper", "trace-full"])
def test_records_are_the_codecs_bits_of_the_rollouts_blocks(method: str) -> None:
    engine = make_engine(method)
    for t in engine.generate(tiny_requests(3, probe_every=1)):
        r, probe = record(engine, t.guidance), record(engine, t.probe)
        assert r.layers == ((1,) if method in ("trace", "trace-paper") else (0, 1))
        assert (probe.layers, probe.bits) == ((0, 1), 4.5)
        for site, data in r.sites.items():
            for i, layer in enumerate(r.layers):
                want = encode(full_blocks(engine, probe, site, layer), bits=r.bits)
                assert torch.equal(data.payload[i], want.payload)
                assert data.encode_scale is not None
                assert want.encode_scale is not None
                assert torch.equal(
                    data.encode_scale[i][:, None] if site == "expert_input" else data.encode_scale, want.encode_scale
                )


def hooked(model: Any, t: Trajectory, module: Any) -> Tensor:
    """Output of a module of the transformers model over the trajectory's rows."""
    caught: list[Tensor] = []
    handle = module.register_forward_hook(lambda _m, _a, out: caught.append(out))
    with torch.no_grad():
        model(torch.tensor([t.token_ids[:-1]]))
    handle.remove()
    return caught[0]


def same_share(a: Tensor, b: Tensor) -> float:
    return float((a == b).float().mean())


def test_full_codes_are_those_of_a_reference_forward() -> None:
    """Without quantized weights and cache nothing but FP32 noise lies before the inputs of the first experts."""
    quant = {"weights": "none", "kv": "none"}
    engine, model = make_engine("naive", "float32", quant=quant), tiny_model(tiny_config())
    for t in engine.generate(tiny_requests(4, probe_every=1)):
        x = hooked(model, t, model.model.layers[0].post_attention_layernorm)[0]
        want = get_format("nvfp4").quantize(x, encode_scale="row-pow2")
        probe = record(engine, t.probe)
        assert set(probe.sites) == {"expert_input"}
        got = full_blocks(engine, probe, "expert_input", 0)
        assert same_share(got.unpacked_codes(), want.unpacked_codes()) > 0.999
        assert same_share(got.scales, want.scales) > 0.99
        assert got.encode_scale is not None
        assert want.encode_scale is not None
        assert same_share(got.encode_scale, want.encode_scale) > 0.99


def test_key_and_value_codes_are_those_of_a_reference_forward() -> None:
    quant = {"weights": "none", "activations": "none", "kv_encode_scale": 4.0}
    engine, model = make_engine("naive", "float32", quant=quant), tiny_model(tiny_config())
    for t in engine.generate(tiny_requests(4, probe_every=1)):
        rows = t.num_rows
        attention = model.model.layers[0].self_attn
        v = hooked(model, t, attention.v_proj)[0]
        k = hooked(model, t, attention.k_norm)[0]  # [rows, G, D] before RoPE
        cos, sin = model.model.rotary_emb(k, torch.arange(rows)[None])
        a, b = k.chunk(2, -1)
        k = k * cos[0][:, None] + torch.cat([-b, a], -1) * sin[0][:, None]
        probe = record(engine, t.probe)
        for site, x in (("key", k.flatten(1)), ("value", v)):
            want = get_format("nvfp4").quantize(x, encode_scale=torch.tensor(4.0))
            got = full_blocks(engine, probe, site, 0)
            assert same_share(got.unpacked_codes(), want.unpacked_codes()) > 0.999
            assert same_share(got.scales, want.scales) > 0.99
            assert float(probe.sites[site].encode_scale) == 4.0  # type: ignore[arg-type]


def test_full_codes_only_where_asked() -> None:
    engine = make_engine()
    done = engine.generate(tiny_requests(6, probe_every=3))
    assert [t.probe is not None for t in done] == [True, False, False, True, False, False]
    assert len(engine.store) == 6 + 2  # type: ignore[arg-type]
    assert {t.probe.sample_id for t in done if t.probe} == {"r0/probe", "r3/probe"}


def test_methods_without_guidance_record_nothing() -> None:
    for method in ("bf16", "naive", "qat"):
        engine = make_engine(method)
        (t,) = engine.generate(tiny_requests(1))
        assert t.guidance is None
        assert t.routed_experts is not None
        assert len(engine.store) == 0  # type: ignore[arg-type]
    (t,) = make_engine("bf16").generate(tiny_requests(1, probe_every=1))
    assert t.probe is None


@pytest.mark.parametrize("kv", ["mxfp4-even", "nvfp4-4over6"])
def test_sites_of_different_formats(kv: str) -> None:
    """A probe keeps the full width of each site's own format."""
    engine = make_engine("naive", quant={"kv": kv})
    (t,) = engine.generate(tiny_requests(1, probe_every=1))
    assert t.probe is not None
    record = engine.store.get(t.probe)
    widths = {site: rows.payload.shape[-1] for site, rows in record.sites.items()}
    own = row_bytes(kv, full_bits(kv), 64)
    assert widths == {"expert_input": row_bytes("nvfp4", 4.5, 64), "key": own, "value": own}


# -- preemption -----------------------------------------------------------------------------------------------------


def test_preemption_changes_no_token_and_marks_its_rows(plain: dict[str, Trajectory]) -> None:
    requests = tiny_requests(10)
    engine = make_engine("bf16", "float32", page_size=4, num_pages=16)
    done = engine.generate(requests)
    assert engine.scheduler.num_preemptions > 3
    for t in done:
        assert t.response_ids == plain[t.request_id].response_ids
        assert (t.logprobs - plain[t.request_id].logprobs).abs().max() < 1e-5
    assert engine.blocks.num_free == 16

    engine = make_engine("trace-all", "float32", page_size=4, num_pages=16)
    for r in requests:
        engine.add_request(r)
    recomputed: dict[str, int] = {}
    finished: dict[str, Trajectory] = {}
    while engine.scheduler.unfinished:
        for s in engine._by_id.values():
            recomputed[s.request.request_id] = s.num_recomputed
        live = dict(engine._by_id)
        finished |= by_id(engine.step())
        recomputed |= {name: s.num_recomputed for name, s in live.items()}
    assert sum(n > 0 for n in recomputed.values()) > 3
    for name, t in finished.items():
        check_contract(engine, t)
        valid = record(engine, t.guidance).valid
        n = recomputed[name]
        valid = valid.tolist()
        assert valid == [False] * n + [True] * (t.num_rows - n)
        assert n < t.num_rows
        assert t.routed_experts is not None
        assert ((t.routed_experts >= 0).all(-1).all(-1) == torch.tensor(valid)).all()


def test_pages_are_clean_for_their_next_owner() -> None:
    """NaN left in every slot of the cache by an earlier owner does not reach anyone."""
    fresh, used = make_engine("bf16", "float32"), make_engine("bf16", "float32")
    used.pool._kv.fill_(float("nan"))  # type: ignore[attr-defined]
    want = fresh.generate(tiny_requests(6))
    for a, b in zip(want, used.generate(tiny_requests(6)), strict=True):
        assert a.response_ids == b.response_ids
        assert torch.equal(a.logprobs, b.logprobs)


# -- abort ----------------------------------------------------------------------------------------------------------


def check_aborted(engine: RolloutEngine, t: Trajectory, rows: int) -> None:
    assert t.finish_reason == "abort"
    assert t.logprobs.shape == t.versions.shape == (len(t.response_ids),)
    assert t.row_versions.tolist() == [0] * rows + [-1] * (t.num_rows - rows)
    assert (t.routed_experts is not None) == (rows == t.num_rows)
    r = record(engine, t.guidance)
    assert r.rows == rows
    assert r.token_ids.tolist() == list(t.token_ids[:rows])
    with pytest.raises(TracefpError, match=f"request id {t.request_id} is not in the engine"):
        engine.abort(t.request_id)


def test_abort_of_a_running_request() -> None:
    engine = make_engine()
    want = by_id(engine.generate(tiny_requests(3)))
    want_record = record(engine, want["r1"].guidance)
    engine.store.discard([t.guidance for t in want.values() if t.guidance])
    for r in tiny_requests(3):
        engine.add_request(r)
    steps(engine, 5)
    t = engine.abort("r1")
    assert t.response_ids == want["r1"].response_ids[:5]
    check_contract(engine, t)
    check_aborted(engine, t, t.num_rows)
    for site in WIDTHS:
        got = record(engine, t.guidance).sites[site].payload
        assert torch.equal(got, want_record.sites[site].payload[:, : t.num_rows])
    rest = drain(engine)
    assert {name: x.response_ids for name, x in rest.items()} == {n: want[n].response_ids for n in ("r0", "r2")}
    assert engine.blocks.num_free == engine.blocks.num_pages


def test_abort_before_all_rows_are_there() -> None:
    engine = make_engine(max_tokens_per_step=6, max_num_seqs=2)
    prompt = tuple(range(2, 22))
    engine.add_request(Request("half", prompt, SamplingParams(max_new_tokens=4), probe=True))
    engine.add_request(Request("waiting", prompt, SamplingParams(max_new_tokens=4)))
    engine.step()
    engine.step()
    waiting, half = engine.abort("waiting"), engine.abort("half")
    assert waiting.response_ids == half.response_ids == ()
    check_aborted(engine, waiting, 0)
    check_aborted(engine, half, 12)
    assert record(engine, half.probe).rows == 12
    assert engine.blocks.num_free == engine.blocks.num_pages
    assert engine.step() == []


def test_abort_of_a_preempted_request() -> None:
    engine = make_engine(page_size=4, num_pages=10)
    for r in tiny_requests(4, min_prompt=8, max_prompt=8):
        engine.add_request(r)
    while not engine.scheduler.num_preemptions:
        engine.step()
    (victim,) = [s for s in engine.scheduler.waiting if s.num_recomputed]
    t = engine.abort(victim.request.request_id)
    assert len(t.response_ids) > 0
    check_aborted(engine, t, 0)
    drain(engine)
    assert engine.blocks.num_free == engine.blocks.num_pages


# -- weights --------------------------------------------------------------------------------------------------------


def test_bad_updates_leave_the_old_weights_working() -> None:
    engine = make_engine()
    want = engine.generate(tiny_requests(2))
    engine.store.discard([t.guidance for t in want if t.guidance])
    good = tiny_weights(tiny_config(), seed=5)
    last = "model.layers.1.mlp.experts.down_proj"
    cases: list[tuple[dict[str, Tensor], int, str]] = [
        ({k: v for k, v in good.items() if k != last}, 1, f"{last} is missing"),
        ({**good, last: good[last][..., :-1]}, 1, last),
        ({**good, "model.norm.weight": good["model.norm.weight"] * float("nan")}, 1, "model.norm.weight holds NaN"),
        ({**good, last: good[last].index_fill(0, torch.tensor([3]), float("inf"))}, 1, f"{last} holds NaN or Inf"),
        ({**good, last: torch.full_like(good[last], 3.4e38)}, 1, f"{last} holds NaN or Inf"),
        ({**good, "model.layers.2.mlp.gate.weight": torch.ones(1)}, 1, "model.layers.2.mlp.gate.weight is not part"),
        (good, 0, "must rise: the engine holds 0, the update is 0"),
        (good, -3, "must rise"),
    ]
    for weights, version, message in cases:
        with pytest.raises(TracefpError, match=message) as error:
            engine.update_weights(weights.items(), version)
        assert "\n" not in str(error.value)
    assert engine.version == 0
    for a, b in zip(want, engine.generate(tiny_requests(2)), strict=True):
        assert a.response_ids == b.response_ids
        assert torch.equal(a.logprobs, b.logprobs)


@pytest.mark.parametrize("method", ["bf16", "naive"])
def test_the_trainers_tensors_are_copied(method: str) -> None:
    config = tiny_config(tie_word_embeddings=False, mlp_only_layers=[0])
    weights = tiny_weights(config)
    engine = make_engine(method, "float32", config=config, load=False)
    engine.update_weights(weights.items(), 0)
    want = engine.generate(tiny_requests(2))
    for w in weights.values():
        w.fill_(float("nan"))
    for a, b in zip(want, engine.generate(tiny_requests(2)), strict=True):
        assert torch.equal(a.logprobs, b.logprobs)


def test_a_weight_change_is_marked_per_token_and_per_row() -> None:
    config = tiny_config()
    engine = make_engine("trace-all", "float32", config=config, max_tokens_per_step=20)
    prompt = tuple(range(2, 12))
    engine.add_request(Request("a", prompt, SamplingParams(max_new_tokens=8)))
    engine.add_request(Request("b", prompt * 2, SamplingParams(max_new_tokens=8)))
    engine.step()  # all of a's prompt, half of b's
    engine.update_weights(tiny_weights(config, seed=1).items(), 3)
    engine.step()  # the rest of b's prompt
    engine.step()
    engine.update_weights(tiny_weights(config, seed=2).items(), 4)
    done = drain(engine)
    a, b = done["a"], done["b"]
    assert a.versions.tolist() == [0] + [3] + [4] * 6
    assert a.row_versions.tolist() == [0] * 10 + [3] + [4] * 6
    assert b.versions.tolist() == [3] * 2 + [4] * 6
    assert b.row_versions.tolist() == [0] * 10 + [3] * 10 + [3] + [4] * 6
    for t in (a, b):
        check_contract(engine, t)
    # The new weights are really in use, over the old rows' K and V.
    same = make_engine("trace-all", "float32", config=config)
    (old,) = same.generate([Request("a", prompt, SamplingParams(max_new_tokens=8))])
    assert a.response_ids[0] == old.response_ids[0]
    assert not torch.allclose(a.logprobs[1:], old.logprobs[1:], atol=1e-3)


# -- refusals and failures ------------------------------------------------------------------------------------------


def test_requests_that_cannot_run_are_refused_by_name() -> None:
    engine = make_engine(num_pages=3, page_size=16)
    ok = Request("x", (3, 4), SamplingParams(max_new_tokens=3))
    engine.add_request(ok)
    cases = [
        (ok, "x is already in the engine"),
        (Request("empty", (), SamplingParams()), "empty has an empty prompt"),
        (Request("big", (3, 32), SamplingParams(max_new_tokens=1)), r"big has a token id outside 0\.\.31"),
        (Request("neg", (-1,), SamplingParams(max_new_tokens=1)), "neg has a token id outside"),
        (
            Request("long", (3,) * 40, SamplingParams(max_new_tokens=25)),
            r"long: 40 prompt tokens \+ 25 new exceed rollout.max_model_len 64",
        ),
        (
            Request("wide", (3,) * 40, SamplingParams(max_new_tokens=24)),
            "wide needs 4 cache pages of 16, the engine has 3; raise rollout.num_pages",
        ),
    ]
    for request, message in cases:
        with pytest.raises(TracefpError, match=message) as error:
            engine.add_request(request)
        assert "\n" not in str(error.value)
    assert set(drain(engine)) == {"x"}
    with pytest.raises(TracefpError, match="x has a record in the guidance store"):
        engine.add_request(ok)


def test_an_engine_without_weights_or_requests() -> None:
    engine = make_engine(load=False)
    engine.add_request(tiny_requests(1)[0])
    with pytest.raises(TracefpError, match="no weights yet"):
        engine.step()
    idle = make_engine()
    assert idle.step() == []
    assert idle.generate([]) == []
    config = tiny_config()
    with pytest.raises(TracefpError, match="recipe is for 2 layers, the checkpoint has 3"):
        RolloutEngine(tiny_config(num_hidden_layers=3), idle.recipe)
    with pytest.raises(TracefpError, match="max_model_len 600 exceeds"):
        make_engine(config=config, max_model_len=600)
    with pytest.raises(TracefpError, match="sliding_window"):
        make_engine(config=tiny_config(use_sliding_window=True, sliding_window=8))


def test_generate_is_all_or_nothing() -> None:
    engine = make_engine()
    good = tiny_requests(4)
    with pytest.raises(TracefpError, match="empty prompt"):
        engine.generate([*good, Request("bad", (), SamplingParams())])
    with pytest.raises(TracefpError, match="already in the engine"):
        engine.generate([*good, good[0]])

    def interrupt(_n: int) -> None:
        raise KeyboardInterrupt

    short = [replace(good[0], sampling=SamplingParams(max_new_tokens=2)), *good[1:]]
    with pytest.raises(KeyboardInterrupt):
        engine.generate(short, progress=interrupt)
    assert engine.scheduler.unfinished == 0
    assert engine.blocks.num_free == engine.blocks.num_pages
    assert len(engine.store) == 0  # type: ignore[arg-type]
    assert len(engine.generate(good)) == 4
    engine.add_request(Request("other", (3,), SamplingParams(max_new_tokens=3)))
    with pytest.raises(TracefpError, match="idle engine; 1 requests are unfinished"):
        engine.generate([])


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_step_that_raises_settles_nothing(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN logits stop the step; after the cause is gone the same rows run again, with the same result."""
    want = {t.request_id: t for t in make_engine("bf16", "float32").generate(tiny_requests(4))}
    engine = make_engine("bf16", "float32", max_tokens_per_step=9)
    for r in tiny_requests(4):
        engine.add_request(r)
    done: list[Trajectory] = []
    for _ in range(0 if when == "prefill" else 9):
        done += engine.step()
    forward = engine.model.forward

    def broken(step: Any, pool: Any) -> Any:
        logits, captured = forward(step, pool)
        if len(logits):
            pool._kv[:, :, step.slots] = float("nan")
        return logits * float("nan"), captured

    monkeypatch.setattr(engine.model, "forward", broken)
    for _ in range(3):
        with pytest.raises(FloatingPointError, match="not finite"):
            steps(engine, 3)
    monkeypatch.undo()
    finished = by_id(done) | drain(engine)
    assert set(finished) == set(want)
    for name, t in finished.items():
        assert t.response_ids == want[name].response_ids
        assert (t.logprobs - want[name].logprobs).abs().max() < 1e-5
        assert t.num_rows == len(t.row_versions)
    assert engine.blocks.num_free == engine.blocks.num_pages


def test_a_cache_beyond_the_machines_memory_is_refused() -> None:
    with pytest.raises(TracefpError, match=r"KV cache would take .* GiB: lower rollout.max_num_seqs"):
        make_engine("bf16", num_pages=10**9)
