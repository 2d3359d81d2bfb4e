"""The budget in bytes: what is counted, what is left for pages, and what is refused; settings by backend."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernel_case import dense, engine, moe, requests
from tiny import tiny_recipe
from tracefp4.config import with_overrides
from tracefp4.errors import TracefpError
from tracefp4.loop import RunConfig
from tracefp4.loop.parts import preflight
from tracefp4.recipe import Compensation, QuantRecipe
from tracefp4.rollout.config import RolloutConfig, resolve
from tracefp4.rollout.head import HEAD_BYTES, HEAD_LOGIT_BYTES, likeliest
from tracefp4.rollout.kv_pool import QuantizedKVPool
from tracefp4.rollout.memory import LOGITS_SLACK, logits_bytes, plan, weight_bytes
from tracefp4.rollout.model import ModelShape
from tracefp4.rollout.sampler import DRAW_BYTES, DRAW_LOGIT_BYTES, SamplingTensors, draw, row_blocks
from tracefp4.types import SamplingParams

# Qwen3-30B-A3B
REAL = ModelShape(
    layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, experts_per_token=8, expert_width=768,
    dense_width=6144, vocab=151936, norm_eps=1e-6, rope_theta=1e6, norm_topk_prob=True, max_positions=40960,
    tied_embeddings=False, dense_layers=frozenset(),
)  # fmt: skip


def real_plan(form: str, **settings: Any) -> Any:
    recipe = QuantRecipe(48) if form == "bf16" else QuantRecipe(48, "nvfp4", "nvfp4", "nvfp4", guided_layers=(46, 47))
    config = RolloutConfig(backend="triton", max_model_len=8192, max_num_seqs=512, memory_gb=130, **settings)
    return plan(REAL, recipe, resolve(config, "cpu", REAL, recipe))


@pytest.mark.parametrize("method", ["bf16", "naive", "w4a16", "a4", "quads", "mx"])
@pytest.mark.parametrize("backend", ["torch", "references"])
@pytest.mark.parametrize("shape", [moe(), moe(mlp_only_layers=[0], tie_word_embeddings=False), dense()], ids=str)
def test_weight_bytes_are_those_of_the_tensors(shape: Any, backend: str, method: str) -> None:
    mx = {"weights": "mxfp4-rceil", "activations": "mxfp8-rceil", "kv": "mxfp4-rceil"}
    quant = {"w4a16": {"activations": "none"}, "a4": {"weights": "none"}, "mx": mx}.get(method, {})
    if (method, backend) == ("a4", "references"):
        return  # refused there
    name = method if method in ("bf16", "naive", "quads") else "naive"
    made = engine(name, backend, shape, quant)
    tables = made.model._cos.nbytes + made.model._sin.nbytes
    counted = weight_bytes(made.shape, made.recipe, torch.bfloat16, made.config.backend)
    assert counted == sum(t.nbytes for t in made.model.weight_tensors) + tables


def test_fp4_leaves_more_pages_to_the_same_budget() -> None:
    """61.1 GB of BF16 weights against 19.4 GB, and a token of 98,304 bytes against 27,648."""
    bf16, fp4 = real_plan("bf16"), real_plan("fp4")
    assert 60.5e9 < bf16.weights < 61.5e9
    assert 19e9 < fp4.weights < 20e9
    assert (bf16.slot, fp4.slot) == (98304, 27648)
    assert 5 < fp4.pages / bf16.pages < 6.2
    for p in (bf16, fp4):
        assert p.fixed + (p.pages + 1) * 64 * p.slot <= 130e9
        assert p.fixed + (p.pages + 3) * 64 * p.slot > 130e9


def test_recording_is_counted_and_does_not_grow_with_the_cache() -> None:
    small, large = real_plan("fp4"), real_plan("fp4", max_tokens_per_step=8192)
    assert small.recording > 0
    assert large.recording == pytest.approx(2 * small.recording, rel=1e-3)
    assert large.pages < small.pages
    assert real_plan("bf16").recording < small.recording  # the routing alone


def test_no_more_pages_than_can_be_used() -> None:
    made = engine("naive", "references", memory_gb=1.0)
    assert made.blocks.num_pages == 4 * 3
    assert len(made.generate(requests(3))) == 3


@pytest.mark.parametrize("backend", ["torch", "references"])
def test_an_engine_stays_within_its_budget(backend: str) -> None:
    config = RolloutConfig(
        max_num_seqs=4, max_model_len=48, page_size=16, max_tokens_per_step=16,
        backend="torch" if backend == "torch" else "triton",
    )  # fmt: skip
    shape, recipe = ModelShape.from_hf(moe()), tiny_recipe("trace-all", 2)
    fixed = plan(shape, recipe, resolve(config, "cpu", shape, recipe))
    budget = (fixed.fixed + 5.5 * 16 * fixed.slot) / 1e9
    made = engine("trace-all", backend, max_tokens_per_step=16, memory_gb=budget)
    assert made.blocks.num_pages == (5 if backend == "torch" else 4)
    assert len(made.generate(requests(6))) == 6
    held = sum(t.nbytes for t in made.model.weight_tensors)
    if made.kernels is not None:
        held += sum(t.nbytes for c in made.kernels.pool.layers for t in c.tensors)
        assert made.kernels.recorder is not None
        held += made.kernels.recorder._device_rows.nbytes
        assert made.kernels.recorder._device_rows.nbytes == fixed.recording
    assert held <= budget * 1e9


def test_full_codes_of_two_formats_are_counted_by_their_own_widths() -> None:
    mx = {"weights": "mxfp4-rceil", "activations": "mxfp8-rceil", "kv": "mxfp4-rceil"}
    made = engine("trace-full", "torch", quant=mx, memory_gb=1.0)
    assert isinstance(made.pool, QuantizedKVPool)
    assert made.recorder is not None
    tensors = [made.pool.codes, made.pool.scales, made._experts, *made.recorder._payload.values()]
    slots = made.blocks.num_pages * 16
    assert plan(made.shape, made.recipe, made.config).slot == sum(t.nbytes for t in tensors) // slots


def test_a_cache_of_mx_values_is_measured_as_the_kernels_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense: 196,608 bytes where a packed one takes 55,296."""
    monkeypatch.setattr(os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 100_000}[name])
    engine("naive", "references")
    with pytest.raises(TracefpError, match="KV cache would take"):
        engine("naive", "references", quant={"kv": "mxfp4-rceil"})
    engine("naive", "torch", quant={"kv": "mxfp4-rceil"})


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_budget_that_holds_no_sequence_is_refused_with_the_sum(backend: str) -> None:
    what = r"rollout.memory_gb 0.0001 does not hold one sequence: weights .* GB, .*max_model_len 48 .*at least 0\.0"
    with pytest.raises(TracefpError, match=what) as error:
        engine("naive", "torch" if backend == "torch" else "references", memory_gb=0.0001)
    least = float(str(error.value).rsplit(" ", 1)[1]) * 1.01
    engine("naive", "torch" if backend == "torch" else "references", memory_gb=least)


# -- logits ---------------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """Bytes of storages made within that are alive at once, at most; a sort with what it takes on a GPU besides."""

    SORT = 40  # bytes an element, of FP64 and below 128 rows: see DRAW_LOGIT_BYTES

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        old = {t.untyped_storage()._cdata for t in given}
        out = func(*args, **(kwargs or {}))
        for t in (t for t in tree_leaves(out) if isinstance(t, Tensor)):
            storage = t.untyped_storage()
            key = storage._cdata
            if key not in old and key not in self._known:
                self._known[key] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._gone, key)
        scratch = self.SORT * given[0].numel() if func.overloadpacket is torch.ops.aten.sort else 0
        self.most = max(self.most, self._now + scratch)
        return out

    def _gone(self, key: int) -> None:
        self._now -= self._known.pop(key)


def peak(run: Callable[[], Any]) -> int:
    with torch.no_grad(), Peak() as found:
        run()
    return found.most


def drawing_peak(rows: int, vocab: int, top_p: float) -> int:
    """On the device that computes nothing."""
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="meta")
    settings = SamplingTensors.of([SamplingParams(top_p=top_p)] * rows).to(torch.device("meta"))
    positions = torch.empty(rows, dtype=torch.int64, device="meta")
    return peak(lambda: draw(logits, settings, positions, top_p < 1))


def head_peak(rows: int, vocab: int) -> int:
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device="meta")
    return peak(lambda: likeliest(logits, torch.empty(rows, device="meta"), 20))


SIZES = [(1, REAL.vocab), (3, 32000), (40, REAL.vocab), (300, 32000), (512, REAL.vocab), (2, 20_000_000)]


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_drawing_takes_what_a_block_of_rows_may_take(rows: int, vocab: int) -> None:
    """The bytes of a logit are right to a hundredth, but for what there is of each row; a row is the least block."""
    for found, logit, most in (
        (drawing_peak(rows, vocab, 0.9), DRAW_LOGIT_BYTES, DRAW_BYTES),
        (head_peak(rows, vocab), HEAD_LOGIT_BYTES, HEAD_BYTES),
    ):
        block = row_blocks(rows, vocab, logit, most)[0].stop * vocab * logit
        assert found == pytest.approx(block, rel=0.01)
        assert block <= most or block == vocab * logit


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(("rows", "vocab"), SIZES)
def test_the_budget_holds_logits_and_every_way_to_draw_from_them(rows: int, vocab: int, graphs: bool) -> None:
    shape = replace(REAL, vocab=vocab)
    logits = rows * vocab * 2
    for backend in ("torch", "triton"):
        if backend == "torch" and graphs:
            continue
        config = RolloutConfig(backend=backend, max_num_seqs=rows, cuda_graphs=graphs, page_size=64)
        budget = logits_bytes(shape, config) / LOGITS_SLACK * 1.001
        assert logits + drawing_peak(rows, vocab, 0.9) <= budget
        assert logits + head_peak(rows, vocab) <= budget
        if backend == "torch":
            assert logits + drawing_peak(rows, vocab, 1.0) <= budget
        if graphs:  # a buffer; and top-p behind a graph beside what the likeliest tokens keep in another
            assert 2 * logits + drawing_peak(rows, vocab, 0.9) + head_peak(rows, vocab) <= budget
        assert plan(shape, QuantRecipe(48), config).workspace > logits_bytes(shape, config)


def test_more_rows_take_more_logits_but_no_more_to_draw_by_top_p() -> None:
    assert drawing_peak(1024, REAL.vocab, 0.9) < 1.01 * DRAW_BYTES
    few, many = (
        logits_bytes(REAL, RolloutConfig(backend="triton", max_num_seqs=n, cuda_graphs=False)) for n in (512, 1024)
    )
    assert many - few < LOGITS_SLACK * (512 * REAL.vocab * 2 + 0.1 * DRAW_BYTES)


# -- settings -------------------------------------------------------------------------------------------------------


def test_auto_follows_the_device() -> None:
    for device, backend, page in (("cpu", "torch", 16), ("meta", "torch", 16), ("cuda", "triton", 64)):
        found = resolve(RolloutConfig(), device, REAL, QuantRecipe(48))
        assert (found.backend, found.page_size) == (backend, page)
    own = resolve(RolloutConfig(backend="torch", page_size=7), "cuda", REAL, QuantRecipe(48))
    assert own.page_size == 7
    assert not resolve(RolloutConfig(backend="native"), "cuda", REAL, QuantRecipe(48)).cuda_graphs


@pytest.mark.parametrize(
    ("recipe", "config", "named"),
    [
        (QuantRecipe(48), RolloutConfig(dtype="float32"), 'rollout.dtype "float32"'),
        (QuantRecipe(48, "mxfp4-even", "mxfp4-even"), RolloutConfig(), "expert products in mxfp4-even of more than 16"),
        (QuantRecipe(48, "nvfp4", "nvfp4", "nvfp4-4over6"), RolloutConfig(), 'quant.kv "nvfp4-4over6"'),
        (QuantRecipe(48, "nvfp4", "nvfp4", compensation=Compensation("quads")), RolloutConfig(), "quads"),
    ],
)
def test_auto_takes_torch_where_the_kernels_do_not_apply(
    recipe: QuantRecipe, config: RolloutConfig, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve(config, "cuda", REAL, recipe).backend == "torch"
    assert named in capsys.readouterr().err
    with pytest.raises(TracefpError, match="does not run .*" + named):
        resolve(config.model_copy(update={"backend": "triton"}), "cuda", REAL, recipe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"page_size": 24}, r'rollout.page_size 24 is no multiple of 16, which backend "triton" needs'),
        ({"memory_gb": 1.0, "num_pages": 3}, r"memory_gb and rollout.num_pages both size the cache"),
        ({"dtype": "float32"}, r'"triton" does not run rollout.dtype "float32".*set rollout.backend="torch"'),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TracefpError, match=message) as error:
        engine("naive", "triton", **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "quant", "message"),
    [
        (moe(head_dim=32), {}, "head_dim 32, the kernels take 64, 128 or 256"),
        (moe(), {"weights": "none"}, 'quant.activations "nvfp4" with quant.weights "none"'),
        (moe(), {"kv": "nvfp4-4over6"}, 'quant.kv "nvfp4-4over6", the kernels keep a cache in nvfp4 or nvfp4-exact or'),
        (moe(moe_intermediate_size=64), {}, "moe_intermediate_size 64, the kernels take multiples of 128"),
        (dense(intermediate_size=96), {}, "intermediate_size 96"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_models_that_the_kernels_do_not_take(config: Any, quant: dict[str, Any], message: str) -> None:
    with pytest.raises(TracefpError, match=message):
        engine("naive", "triton", config, quant, load=False)
    engine("naive", "torch", config, quant, load=False)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a GPU where nobody has set TRITON_INTERPRET."""
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tensors are on the GPU")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


NEEDS_GPU = r'rollout.backend "triton" needs tensors on a GPU: set the device to cuda, or set rollout.backend="torch"$'


@pytest.mark.parametrize("config", [moe(), moe(head_dim=32)], ids=str)
def test_triton_on_the_cpu_is_refused_for_the_device_whatever_the_model(compiled: None, config: Any) -> None:
    with pytest.raises(TracefpError, match=NEEDS_GPU):
        engine("naive", "triton", config)
    assert len(engine("naive", "references").generate(requests(1))) == 1


def test_a_run_with_triton_on_the_cpu_is_refused_at_its_start(compiled: None) -> None:
    settings = ["rollout.backend=triton", "run.device=cpu"]  # of a model whose head_dim the kernels do not take either
    with pytest.raises(TracefpError, match=NEEDS_GPU):
        preflight(with_overrides({}, settings, RunConfig, "a recipe"))


def test_a_machine_without_triton_is_told_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(TracefpError, match=r"needs the package triton, which is not installed: pip install triton, or"):
        engine("naive", "triton", moe(head_dim=32))
