"""Decode throughput of the whole engine at fixed contexts: BF16, FP4, and FP4 with guidance recorded.

    tracefp4 bench rollout --out DIR                       Qwen3-30B-A3B's shape, random weights, on a GPU
    tracefp4 bench rollout --device cpu --layers 2 ...     the same flow over the kernels' references, small

Every form has the same bytes for weights and cache; what its weights leave is filled with sequences of one context
length, whose cache holds random codes. Steps of the engine are timed by the clock, everything in them included. Beside
each stand the bytes that a step cannot avoid and how near it comes to moving them at the measured copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench.clocks import sampled
from tracefp4.bench.registry import environment
from tracefp4.bench.rollout_table import Row, ratios, table
from tracefp4.device import machine_memory
from tracefp4.errors import TracefpError
from tracefp4.guidance.schema import plane_layout
from tracefp4.recipe import QuantRecipe, resolve_guided_layers
from tracefp4.rollout.config import BURST, MOST_STEPS, RolloutConfig, burst_of, obstacle_to_kernels
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.kernel_model import KernelModel, KernelStep
from tracefp4.rollout.model import Layer, ModelShape
from tracefp4.rollout.paged_pool import PagedPool, slot_bytes
from tracefp4.rollout.sequence import Sequence, Status
from tracefp4.rollout.weights import num_parameters, tensors_of, weight_sizes
from tracefp4.types import Request, SamplingParams

FORMS = ("bf16", "fp4", "fp4-recorded")
SIZES = {
    "layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128, "top_k": 8,
    "expert_width": 768, "vocab": 151936,
}  # fmt: skip
"""Of Qwen3-30B-A3B."""
PAGE = 64


WARM = 3
"""Calls before those that are timed, and calls that are profiled after them."""


def new_tokens(args: argparse.Namespace, burst: int) -> int:
    """The most that a sequence may be given, where every call is a burst."""
    return int(args.steps) + (2 * WARM + 1) * (args.steps_per_sync or burst)


class UniformModel(KernelModel):
    """Tokens choose their experts evenly, whatever the router says (it runs all the same).

    choices int64 [layers, M, K]: of the rows of a step, the same in every step. compared: while it is a dict, every
    attention and every MLP runs by the reference too, on the same input; the largest relative difference of each.
    """

    choices: Tensor | None = None
    compared: dict[str, float] | None = None

    def choose_evenly(self, rows: int) -> None:
        s = self.shape
        scores = torch.rand(s.layers, rows, s.experts, generator=torch.Generator().manual_seed(rows))
        self.choices = scores.topk(s.experts_per_token, dim=-1).indices.to(self.device)

    def _choose(self, i: int, layer: Layer, h_NH: Tensor) -> tuple[Tensor, Tensor]:
        gates, chosen = super()._choose(i, layer, h_NH)
        return gates, chosen if self.choices is None else self.choices[i, : len(h_NH)]

    def _attend(self, i: int, layer: Layer, h_NH: Tensor, step: KernelStep, pool: PagedPool) -> Tensor:
        own = super()._attend
        return self._compare("attention", pool, lambda: own(i, layer, h_NH, step, pool))

    def _mlp(
        self, i: int, layer: Layer, h_NH: Tensor, step: KernelStep, experts: list[Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        own = super()._mlp
        if self.compared is None:
            return own(i, layer, h_NH, step, experts)
        results = []

        def summed() -> Tensor:
            results.append(own(i, layer, h_NH, step, experts))
            y, gates = results[-1]
            return y if gates is None else (y.float() * gates[..., None]).sum(1)

        self._compare("experts", None, summed)
        return results[0]

    def _compare(self, part: str, pool: PagedPool | None, run: Callable[[], Tensor]) -> Tensor:
        got = run()
        if self.compared is None:
            return got
        backend = self.backend
        try:
            self.backend = "torch"
            if pool is not None:
                pool.backend = "torch"
            want = run().float()
        finally:
            self.backend = backend
            if pool is not None:
                pool.backend = backend
        off = ((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf).max()
        self.compared[part] = max(self.compared.get(part, 0.0), float(off))
        return got


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tracefp4 bench rollout", description="Decode throughput of the engine.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--contexts", default="8192,32768,131072", help="tokens that a sequence has in its cache")
    parser.add_argument("--budget-gb", type=float, default=130.0, help="10^9 bytes for weights and cache together")
    parser.add_argument("--max-seqs", type=int, default=1024, help="most sequences of a step")
    parser.add_argument("--steps", type=int, default=30, help="timed steps")
    parser.add_argument("--guided", default="deeper-half", help="layers that are recorded: deeper-half or all")
    parser.add_argument("--bits", type=float, default=1.125, help="guidance bits per value")
    parser.add_argument("--routing", choices=("uniform", "router"), default="uniform")
    parser.add_argument("--steps-per-sync", type=int, default=0, help="decode steps in a row; 0: the engine's choice")
    parser.add_argument("--no-graphs", action="store_true", help="no CUDA graphs")
    parser.add_argument("--pdl", action="store_true", help="the kernels by programmatic dependent launch")
    parser.add_argument("--no-profile", action="store_true", help="no share of time by part")
    parser.add_argument("--seconds", type=float, default=540, help="no row is begun after this long")
    parser.add_argument("--out", type=Path, help="folder for rollout.json and rollout.md")
    parser.add_argument("--commit", help="commit to write into the results, where there is no git checkout")
    sizes = parser.add_argument_group("model")
    for name, value in SIZES.items():
        sizes.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    args = parser.parse_args(arguments)
    args.forms = args.forms.split(",")
    if not all(c.isascii() and c.isdigit() and int(c) > 0 for c in args.contexts.split(",")):
        parser.error(f"--contexts takes numbers of tokens joined by commas, not {args.contexts!r}")
    args.contexts = [int(c) for c in args.contexts.split(",")]
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no GPU here; with --device cpu the references are timed")
    if unknown := [f for f in args.forms if f not in FORMS]:
        parser.error(f"--forms takes {', '.join(FORMS)}, not {unknown[0]}")
    if not 0 <= args.steps_per_sync <= MOST_STEPS:
        parser.error(f"--steps-per-sync takes 0 to {MOST_STEPS}, not {args.steps_per_sync}")
    for name, least in (("steps", 2), ("max_seqs", 1)):  # quartiles need two steps
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    if not args.budget_gb > 0:
        parser.error(f"--budget-gb must be more than 0, not {args.budget_gb:g}")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out} is a file: name a folder")
    if why := unfit_sizes(args):
        parser.error(why)
    return args


def unfit_sizes(args: argparse.Namespace) -> str:
    """Why no model has these sizes, or neither the kernels nor this machine take it; "" where they do."""
    for name in SIZES:
        if getattr(args, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, not {getattr(args, name)}"
    if args.heads % args.kv_heads:
        return f"--heads {args.heads} is no multiple of --kv-heads {args.kv_heads}"
    if args.top_k > args.experts:
        return f"--top-k {args.top_k} is more than --experts {args.experts}"
    need, there = 2 * num_parameters(model_shape(args)), machine_memory()
    if args.device == "cpu" and need > 0.5 * there:
        return f"weights of {need / 1e9:.0f} GB in {there / 1e9:.0f} GB of memory: on the CPU give smaller --layers"
    try:
        plane_layout("nvfp4", args.bits)
        for form in args.forms:
            if why := obstacle_to_kernels(model_shape(args), recipe_of(form, args), RolloutConfig()):
                return f"the kernels, which this times, do not take {why}"
    except TracefpError as error:  # of --guided or --bits
        return str(error)
    return ""


def model_shape(args: argparse.Namespace) -> ModelShape:
    return ModelShape(
        layers=args.layers, hidden=args.hidden, heads=args.heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
        experts=args.experts, experts_per_token=args.top_k, expert_width=args.expert_width, dense_width=args.hidden,
        vocab=args.vocab, norm_eps=1e-6, rope_theta=1e6, norm_topk_prob=True,
        max_positions=max(args.contexts) + new_tokens(args, BURST), tied_embeddings=False, dense_layers=frozenset(),
    )  # fmt: skip


def recipe_of(form: str, args: argparse.Namespace) -> QuantRecipe:
    if form == "bf16":
        return QuantRecipe(args.layers)
    guided = resolve_guided_layers(args.guided, args.layers) if form == "fp4-recorded" else ()
    return QuantRecipe(args.layers, "nvfp4", "nvfp4", "nvfp4", guided_layers=guided, bits=args.bits)


def build(shape: ModelShape, recipe: QuantRecipe, args: argparse.Namespace) -> UniformModel:
    """A model of random weights, made on the device and quantized layer by layer."""
    model = UniformModel(shape, recipe, torch.bfloat16, args.device, "triton" if args.device != "cpu" else "torch")
    sizes = dict(weight_sizes(shape))
    g = torch.Generator(args.device).manual_seed(0)

    def take(name: str) -> Tensor:
        w = torch.empty(sizes[name], dtype=torch.bfloat16, device=args.device)
        return w.fill_(1.0) if "norm" in name else w.normal_(0.0, sizes[name][-1] ** -0.5, generator=g)

    model.fill(take)
    return model


def weights_read(model: UniformModel, rows: int) -> int:
    """Bytes of weights that a step of some rows must read: experts that somebody chose, all else but the embedding."""
    s = model.shape
    experts = [t for layer in model._layers for t in tensors_of([layer.gate_up, layer.down])]
    expert_bytes = sum(t.nbytes for t in experts)
    fixed = sum(t.nbytes for t in model.weight_tensors) - expert_bytes - model._embed.nbytes
    if model.choices is None:
        share = 1 - (1 - s.experts_per_token / s.experts) ** rows
    else:
        share = sum(c[:rows].unique().numel() for c in model.choices) / (s.layers * s.experts)
    return int(fixed + share * expert_bytes)


def fill_cache(engine: RolloutEngine) -> None:
    """Random codes of magnitude up to 3, or random BF16."""
    assert engine.kernels is not None
    for cache in engine.kernels.pool.layers:
        for t in cache.tensors:
            if t.dtype == torch.int32:
                t.view(torch.uint8).random_(0, 256)
            elif t.dtype == torch.uint8:
                t.random_(0x20, 0x30)
            else:
                t.normal_()


def start_sequences(engine: RolloutEngine, n: int, context: int, new: int) -> None:
    """n running sequences whose context is in the cache already, their pages in random order."""
    free = list(engine.blocks._free)
    random.Random(0).shuffle(free)
    engine.blocks._free.clear()
    engine.blocks._free.extend(free)
    for i in range(n):
        sampling = SamplingParams(max_new_tokens=2 * new, seed=i)
        seq = Sequence(Request(f"s{i}", (i % engine.shape.vocab,) * context, sampling))
        seq.num_computed, seq.status, seq.row_versions = context - 1, Status.RUNNING, [0] * (context - 1)
        engine.blocks.grow(seq, context)
        engine.scheduler.running.append(seq)
        engine._by_id[seq.request.request_id] = seq


@torch.no_grad()
def check(engine: RolloutEngine, model: UniformModel) -> str:
    """Two rows of the batch through all layers by the kernels, every attention and MLP beside its torch reference.

    Each on the kernels' own input: in FP4 a code that falls to the other side of a boundary moves everything behind it,
    so that the ends of two runs through 48 layers of random weights have nothing in common. Bounds, relative to a
    row's norm: of BF16, 8 roundings of 2^-9; of FP4, a twentieth of the codes between the experts' two products off by
    one slot, at most half of their value: 0.5 sqrt(1/20). A wrong row, or a wrong kernel, is off by 1.4.
    """
    assert engine.kernels is not None
    pool, page = engine.kernels.pool, engine.config.page_size
    seqs = list(engine.scheduler.running)[:2]
    at = torch.tensor([len(s.tokens) - 1 for s in seqs])
    tables = torch.tensor([s.block_table for s in seqs], dtype=torch.int32)
    slots = tables.gather(1, (at // page)[:, None])[:, 0].long() * page + at % page
    tokens = torch.tensor([s.tokens[-1] for s in seqs])
    step = KernelStep(tokens.to(model.device), at.to(model.device), slots.to(model.device))
    step = replace(step, tables=tables.to(model.device), lengths=(at + 1).int().to(model.device))
    model.compared = {}
    try:
        logits = model.run(step, pool)
        found = model.compared
    finally:
        model.compared = None
    bf16 = model.recipe.activations is None and model.recipe.kv is None
    if bf16:  # where nothing is rounded to FP4 the ends of two runs are near each other, too: norms and head included
        found["logits"] = _off_by_references(model, step, pool, logits)
    said = ", ".join(f"{part} off by {off:.2g}" for part, off in found.items())
    bounds = {"attention": 8 * 2**-9, "experts": 8 * 2**-9 if bf16 else 0.5 * 20**-0.5, "logits": 0.5}
    if not torch.isfinite(logits).all():
        raise AssertionError(f"logits are not finite; {said}")
    if any(off > bounds[part] for part, off in found.items()):
        raise AssertionError(f"{said} of a row's norm")
    return said


def _off_by_references(model: UniformModel, step: KernelStep, pool: PagedPool, logits: Tensor) -> float:
    own = model.backend
    try:
        model.backend = pool.backend = "torch"
        want = model.run(step, pool).float()
    finally:
        model.backend = pool.backend = own
    return float(((logits.float() - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf).max())


def measure(
    row: Row, model: UniformModel, recipe: QuantRecipe, args: argparse.Namespace, copy_bytes_per_s: float
) -> None:
    """Fills in a row."""
    cuda = args.device != "cpu"
    shape = model.shape
    row.weight_bytes = sum(t.nbytes for t in model.weight_tensors)
    new = new_tokens(args, burst_of(shape))
    per_seq = -(-(row.context + new) // PAGE)
    page_bytes = slot_bytes(shape, recipe, torch.bfloat16) * PAGE
    pages = int((args.budget_gb * 1e9 - row.weight_bytes) // page_bytes) - 1
    B = row.sequences = min(args.max_seqs, pages // per_seq)
    if B < 1:
        raise TracefpError(f"--budget-gb {args.budget_gb:g} holds no sequence of {row.context} tokens")
    config = RolloutConfig(
        max_num_seqs=B, max_model_len=row.context + new, num_pages=B * per_seq, page_size=PAGE, backend="triton",
        cuda_graphs=not args.no_graphs, max_tokens_per_step=max(B, 2048),
        steps_per_sync=args.steps_per_sync,
    )  # fmt: skip
    model.choices = None
    if args.routing == "uniform":
        model.choose_evenly(B)
    engine = RolloutEngine(shape, recipe, config, device=args.device, kernel_model=model)
    assert engine.kernels is not None
    engine.kernels.pool.backend = model.backend
    engine._version = 0  # the weights were made in place
    fill_cache(engine)
    row.cache_bytes = sum(t.nbytes for c in engine.kernels.pool.layers for t in c.tensors)
    start_sequences(engine, B, row.context, new)
    row.checked = check(engine, model)
    free_memory(args.device)
    times: list[float] = []
    with sampled(torch.device(args.device)) as row.clocks:
        warm = sum(decode(engine) for _ in range(WARM))
        while len(times) < args.steps:
            begun, steps = time.perf_counter(), decode(engine)
            times += [(time.perf_counter() - begun) * 1e3 / steps] * steps
    context_bytes = B * (row.context + warm + len(times) // 2) * slot_bytes(shape, recipe, torch.bfloat16)
    row.bytes_step = weights_read(model, B) + context_bytes + 2 * B * shape.vocab
    row.bound_ms = row.bytes_step / copy_bytes_per_s * 1e3
    row.median_ms = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4)
    row.quartiles_ms = (quartiles[0], quartiles[2])
    row.tokens_per_s = B / row.median_ms * 1e3
    row.of_bound = row.bound_ms / row.median_ms
    if cuda and not args.no_profile:
        row.device_ms, row.parts = profile(engine, WARM)


PARTS = {
    "attention": ("_attend", "_combine"),
    "experts": ("products_", "_route", "_operand_rows", "_weighted_sum", "_choose_experts"),
    "quantize and record": ("_write_kv", "_write_dense", "_quantize_rows"),
    "projections and head": ("gemm", "nvjet", "cutlass", "splitK", "cublas"),
    "norms and rotation": ("_add_norm", "_norm_rotate"),
    "sampling": ("_draw",),
}


def part_of(kernel: str) -> str:
    """Which part of a step a kernel belongs to, by its name."""
    return next((part for part, names in PARTS.items() if any(n in kernel for n in names)), "other")


def decode(engine: RolloutEngine) -> int:
    """One call of the engine; returns how many tokens every sequence got."""
    seq = engine.scheduler.running[0]
    before = len(seq.tokens)
    engine.step()
    return len(seq.tokens) - before


def profile(engine: RolloutEngine, calls: int) -> tuple[float, dict[str, float]]:
    """(milliseconds of the device a step, share of each part) by torch's profiler, in steps that are not timed."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as profiler:
        steps = sum(decode(engine) for _ in range(calls))
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profiler.key_averages():
        us = float(getattr(event, "self_device_time_total", 0.0))
        if us > 0:
            spent[part_of(event.key)] = spent.get(part_of(event.key), 0.0) + us
    total = sum(spent.values())
    shares = {part: us / total for part, us in sorted(spent.items(), key=lambda x: -x[1])} if total else {}
    return total / steps / 1e3, shares


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read plus written, of a large copy on this device, measured now."""
    if device != "cpu":
        from tracefp4.bench.bandwidth import ceilings
        from tracefp4.bench.registry import Timer

        return ceilings(Timer(torch.device(device), 20), torch.device(device))["copy_bytes_per_s"]
    a = torch.ones(1 << 23)
    b, times = torch.empty_like(a), []
    for _ in range(7):
        begun = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - begun)
    return 2 * a.nbytes / statistics.median(times)


def write(out: Path | None, about: dict[str, Any], copy_bytes_per_s: float, rows: list[Row]) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "environment": about,
        "copy_bytes_per_s": copy_bytes_per_s,
        "rows": [asdict(r) for r in rows],
        "ratios": ratios(rows),
    }
    (out / "rollout.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "rollout.md").write_text(table(rows) + "\n", encoding="utf-8")


def run_row(row: Row, model: UniformModel, args: argparse.Namespace, copy_bytes_per_s: float) -> None:
    """Measures; an error ends up in the row."""
    begun = time.perf_counter()
    try:
        measure(row, model, recipe_of(row.form, args), args, copy_bytes_per_s)
    except Exception as error:  # the other rows must go on
        row.error = f"{type(error).__name__}: {error}".strip()
        if not isinstance(error, TracefpError):
            traceback.print_exc(limit=-6)
    row.seconds = time.perf_counter() - begun
    free_memory(args.device)


def free_memory(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 if a row failed."""
    args = parse(arguments)
    shape = model_shape(args)
    if args.pdl:
        from tracefp4.kernels.triton_math import use_dependent_launch

        use_dependent_launch(True)
    begun = time.monotonic()
    copy_bytes_per_s = copy_bandwidth(args.device)
    free_memory(args.device)
    about = environment(torch.device(args.device), args.commit)
    about["settings"] = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    print(about, f"copy {copy_bytes_per_s / 1e12:.3f} TB/s", flush=True)
    rows: list[Row] = []
    for quantized in (False, True):
        forms = [f for f in args.forms if (f != "bf16") == quantized]
        if not forms:
            continue
        # One set of weights serves a form with and without recording.
        weights = replace(recipe_of(forms[0], args), guided_layers=())
        model = build(shape, weights, args)
        for context in args.contexts:
            for form in forms:
                row = Row(form, context)
                rows.append(row)
                if time.monotonic() - begun > args.seconds:
                    row.error = f"not begun: {args.seconds:g} seconds are over"
                    continue
                run_row(row, model, args, copy_bytes_per_s)
                ms = f"{row.median_ms or 0:.2f} ms, bound {row.bound_ms or 0:.2f} ms"
                timed = f"{row.tokens_per_s or 0:.0f} tokens/s, {ms}"
                what = f"{form}, {context}: {row.sequences} sequences, {row.checked}"
                print(f"[{row.seconds:.1f} s] {what}; {row.error or timed}", flush=True)
                write(args.out, about, copy_bytes_per_s, rows)
        del model
        free_memory(args.device)
    write(args.out, about, copy_bytes_per_s, rows)
    print(table(rows))
    return int(any(r.error is not None for r in rows))


if __name__ == "__main__":
    sys.exit(main())
