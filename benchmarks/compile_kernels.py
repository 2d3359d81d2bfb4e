"""Compiles every kernel that the engine can launch, in its default settings, for a GPU that need not be there.

    PYTHONPATH=src python benchmarks/compile_kernels.py [--target sm_90] [--only TEXT] [--multiprocessors 132]

The launchers run as they are, over tensors without storage, and Triton compiles instead of launching; so what is
compiled is what a GPU would be handed, its layouts looked at as at every launch (`triton_layout`). Per kernel and
setting: registers and spilled bytes of a thread, bytes of shared memory. Exit code 1 where one does not compile, asks
for more shared memory than a program may have, or has a layout that it must not have. TRITON_INTERPRET must not be set.
What is compiled once stays in Triton's cache.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tracefp4.kernels.compensation import FACTS
from tracefp4.kernels.compensation import triton as compensation
from tracefp4.kernels.decoder_ops import triton as decoder_ops
from tracefp4.kernels.grouped_experts import PackedExperts
from tracefp4.kernels.grouped_experts import triton as grouped_experts
from tracefp4.kernels.guided_round import triton as guided_round
from tracefp4.kernels.paged_attention import PagedCache
from tracefp4.kernels.paged_attention import triton as paged_attention
from tracefp4.kernels.quantize_record import RecordTarget
from tracefp4.kernels.quantize_record import triton as quantize_record
from tracefp4.kernels.quantize_record.ref import planes
from tracefp4.kernels.sampling import triton as sampling
from tracefp4.kernels.triton_math import use_dependent_launch

SHARED_LIMIT = {80: 166912, 86: 101376, 87: 166912, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376}
"""Bytes of shared memory that one program may have, by compute capability (CUDA programming guide)."""
HIDDEN, WIDTH, EXPERTS, TOP, HEADS, KV_HEADS, VOCAB, PAGE = 2048, 768, 128, 8, 32, 4, 151936, 64  # Qwen3-30B-A3B
MIXTURES = ((HIDDEN, WIDTH, EXPERTS, TOP), (128, 128, 8, 2), (256, 128, 16, 4), (256, 256, 8, 2))
"""(hidden, expert width, experts, experts a token) of Qwen3-30B-A3B, of the task ladder (width 128, last: 256) and of
recipes/large.toml."""
DENSE = (1024, 3072, 1, 1)  # of Qwen3-0.6B, which counts as one expert
Case = tuple[str, Callable[[], Any]]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


class NoGPU:
    """What Triton asks of a driver before it launches something."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@dataclass
class Compiled:
    """Stands in for Triton's launch: compiles, and prints a line for what it has not printed before."""

    limit: int
    launch: Callable[..., Any] = JITFunction.run
    seen: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    case: str = ""

    def run(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        started = time.perf_counter()
        kernel = self.launch(function, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in self.seen:
            self.seen.add(kernel.hash)
            self.report(kernel, options, time.perf_counter() - started)
        return kernel

    def report(self, kernel: Any, options: dict[str, Any], seconds: float) -> None:
        registers, spilled = usage(kernel.asm["cubin"])
        shared = kernel.metadata.shared
        settings = " ".join(f"{k}={v}" for k, v in options.items() if k not in ("enable_fp_fusion", "launch_pdl"))
        line = f"{registers:>4} registers {spilled:>4} spilled {shared:>6} shared  {kernel.metadata.name} [{settings}]"
        if shared > self.limit:
            self.failures.append(f"{self.case}: {kernel.metadata.name} wants {shared} bytes of shared memory")
            line += f"  TOO MUCH SHARED MEMORY: {self.limit} at most"
        print(f"{line}  {self.case}, {seconds:.1f} s", flush=True)


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) of a thread, by the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage said nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


# -- what the engine launches ----------------------------------------------------------------------------------------


def target_of(N: int, K: int, bits: float, scale: bool) -> RecordTarget:
    code_planes, scale_planes = planes("nvfp4", bits)
    payload = empty(4 * N, code_planes * K // 8 + scale_planes * (-(-K // 128)), dtype=torch.uint8)
    scales = empty(4 * N, dtype=torch.float32) if scale else None
    return RecordTarget(payload, empty(N, dtype=torch.int64), bits, scales)


def packed(E: int, O: int, I: int) -> PackedExperts:
    T = I // 128
    words, scales = empty(E, T, O, 16, dtype=torch.int32), empty(E, T, O, 8, dtype=torch.uint8)
    return PackedExperts(words, scales, empty(E, dtype=torch.float32))


def expert_cases() -> Iterator[Case]:
    """At every range of `default_config`, and what changes with the number of rows besides it."""
    for (hidden, width, E, top), form in product(MIXTURES, ("W4A4", "W4A16", "BF16")):
        make = partial(empty, E) if form == "BF16" else partial(packed, E)
        gate_up, down = make(2 * width, hidden), make(hidden, width)
        activations = "nvfp4" if form == "W4A4" else None
        for N in (1, 31, 128, 256, 499, 600, 1024, 2048, 8192):
            choice = empty(N, top, dtype=torch.int64), empty(N, top, dtype=torch.float32)
            run = partial(grouped_experts.routed_experts, empty(N, hidden), *choice, gate_up, down, activations)
            for scale in ("row", "row-pow2") if form == "W4A4" else ("row",):
                for bits in (None, 1.125) if form == "W4A4" else (None,):
                    record = None if bits is None else target_of(N, hidden, bits, True)
                    name = f"experts {form} {N} rows of {hidden}, {scale}, {bits} bits"
                    yield name, partial(run, scale, record=record)


def cache_of(fp4: bool, G: int, D: int, pages: int) -> PagedCache:
    if not fp4:
        return PagedCache(empty(pages, G, PAGE, D), empty(pages, G, PAGE, D))
    words = partial(empty, dtype=torch.int32), partial(empty, dtype=torch.uint8)
    k, v = words[0](pages, G, PAGE, D // 8), words[0](pages, G, D // 8, PAGE)
    return PagedCache(k, v, words[1](pages, G, PAGE, D // 16), words[1](pages, G, D // 16, PAGE))


def attention_cases() -> Iterator[Case]:
    for D in (64, 128, 256):
        for fp4 in (True, False):
            for pages in (1 << 10, 1 << 18):  # 32-bit offsets, and more
                cache = cache_of(fp4, KV_HEADS, D, pages)
                for B in (1, 5, 31, 121, 499, 1024):
                    q, tables = empty(B, HEADS, D), empty(B, 2048, dtype=torch.int32)
                    lengths = empty(B, dtype=torch.int32)
                    run = partial(paged_attention.paged_decode, q, cache, tables, lengths, D**-0.5, 2048 * PAGE)
                    yield f"attention {'FP4' if fp4 else 'BF16'} D={D}, {B} sequences, {pages} pages", run


def quantize_cases() -> Iterator[Case]:
    for N in (499, 4096):
        for scale, K in product(("row", "row-pow2", 1.0), (HIDDEN, 256, 128)):
            for bits in (None, 1.125, 4.5):
                record = None if bits is None else target_of(N, K, bits, isinstance(scale, str))
                run = partial(quantize_record.quantize_record, empty(N, K), "nvfp4", scale, record)
                yield f"quantize {N} rows of {K}, {scale}, {bits} bits", run
        for D in (64, 128, 256):
            qkv = empty(N, HEADS + 2 * KV_HEADS, D)
            k, v = qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]
            cache, slots = cache_of(True, KV_HEADS, D, 1 << 10), empty(N, dtype=torch.int64)
            for bits in (None, 1.125):
                both = [None if bits is None else target_of(N, KV_HEADS * D, bits, False) for _ in range(2)]
                records = None if both[0] is None or both[1] is None else (both[0], both[1])
                run = partial(quantize_record.write_kv, k, v, cache, slots, "nvfp4", (1.0, 1.0), records)
                yield f"write K and V D={D}, {N} rows, {bits} bits", run


def compensation_cases() -> Iterator[Case]:
    """Rows of tokens, and rows of every choice, which are products of two halves; padding is marked by token."""
    facts = empty(FACTS, 3, dtype=torch.float64)
    for hidden, width, E, top in (*MIXTURES[1:], DENSE):
        N = 512
        real = empty(N, dtype=torch.bool)
        hidden_rows = empty(N * top, 2 * width, dtype=torch.float32)
        gate, up = hidden_rows[:, :width], hidden_rows[:, width:]
        for rule, (select, scale) in product(
            ("quads", "resq"),
            (("channels", "row"), ("channels", "row-pow2"), ("row", "row-pow2"), ("2:4", "row-pow2")),
        ):
            for x, factor in ((empty(N, hidden), None), (gate, up)):
                I = x.shape[1]
                form = (facts, "nvfp4", scale, rule, select, I // 2)
                run = partial(compensation.compensated_rows, x, factor, real, *form)
                yield f"compensate {len(x)} rows of {I}, {rule} {select} {scale}", run
        chosen, of_experts = empty(N * top, dtype=torch.int64), empty(E, dtype=torch.float32)
        for rows, O in ((N, 2 * width), (N * top, hidden)):
            y, of_rows = empty(E, rows, O, dtype=torch.float32), empty(rows, 1, dtype=torch.float32)
            run = partial(compensation.chosen_outputs, y, chosen, N * top // rows, of_experts, of_rows, rows == N)
            yield f"compensate: chosen {N * top} of {rows} rows of {O}", run


def training_cases() -> Iterator[Case]:
    for N, K, bits in product((499, 4096), (HIDDEN, 256, 128), (None, 0.125, 1.125, 4.5)):
        code_planes, scale_planes = (0, 0) if bits is None else planes("nvfp4", bits)
        record = None if bits is None else target_of(N, K, bits, True)
        parts = (None, None) if record is None else (record.payload[:N], record.encode_scale)
        valid = None if record is None else empty(N, dtype=torch.bool)
        run = partial(guided_round.round_rows, empty(N, K), "nvfp4", "row-pow2", *parts, valid)
        for band in (None,) if valid is None else (None, 0.06):
            run_one = partial(run, code_planes, scale_planes, "cell", band=band, stale=None if band is None else valid)
            yield f"round {N} rows of {K}, {bits} bits, band {band}", run_one
    yield "largest of a matrix", partial(guided_round.group_amax, empty(EXPERTS, 2 * WIDTH * HIDDEN))


def decoder_cases() -> Iterator[Case]:
    N = 499
    for hidden, _, _, top in MIXTURES:
        x = empty(N, hidden)
        for y in (None, x):
            yield "norm", partial(decoder_ops.add_norm, x, y, empty(hidden), 1e-6)
        gates = empty(N, top, dtype=torch.float32)
        yield "norm", partial(decoder_ops.add_norm, x, empty(N, top, hidden), empty(hidden), 1e-6, gates)
    yield "router", partial(decoder_ops.choose_experts, empty(N, EXPERTS), TOP, True)
    for D in (64, 128, 256):
        qkv, tables = empty(N, (HEADS + 2 * KV_HEADS) * D), [empty(4096, D // 2, dtype=torch.float32)] * 2
        positions = empty(N, dtype=torch.int64)
        yield (
            f"rotation D={D}",
            partial(decoder_ops.norm_rotate, qkv, empty(D), empty(D), *tables, positions, HEADS, KV_HEADS, 1e-6),
        )
        for fp4 in (True, False):
            yield f"read rows D={D}", partial(decoder_ops.read_rows, cache_of(True, KV_HEADS, D, 1024), positions)
            if not fp4:
                k, cache = empty(N, KV_HEADS, D), cache_of(False, KV_HEADS, D, 1024)
                yield f"write rows D={D}", partial(decoder_ops.write_dense, k, k, cache, positions)
    f32 = empty(N, dtype=torch.float32)
    greedy = empty(N, dtype=torch.bool)
    yield "sampling", partial(sampling.draw_tokens, empty(N, VOCAB), f32, greedy, f32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--multiprocessors", type=int, default=132, help="those of the GPU: an H200's unless given")
    args = parser.parse_args()
    number = re.fullmatch(r"sm_(\d+)a?", args.target)
    if number is None or int(number[1]) not in SHARED_LIMIT:
        print(f"--target is one of {', '.join(f'sm_{n}' for n in SHARED_LIMIT)}, got {args.target!r}", file=sys.stderr)
        return 2
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing would be compiled", file=sys.stderr)
        return 2
    capability = int(number[1])
    triton.runtime.driver.set_active(NoGPU(GPUTarget("cuda", capability, 32)))
    compiled = Compiled(SHARED_LIMIT[capability])
    gpu = SimpleNamespace(
        multi_processor_count=args.multiprocessors, shared_memory_per_block_optin=SHARED_LIMIT[capability]
    )
    torch.cuda.get_device_properties = lambda _=None: gpu  # type: ignore[assignment, misc]
    JITFunction.run = lambda self, *a, **k: compiled.run(self, *a, **k)
    print(f"Triton {triton.__version__}, {args.target}, {compiled.limit} bytes of shared memory")
    for dependent in (False, True):
        use_dependent_launch(dependent)
        for cases in (expert_cases, attention_cases, quantize_cases, compensation_cases, training_cases, decoder_cases):
            for name, run in cases():
                if args.only not in name:
                    continue
                compiled.case = name
                try:
                    run()
                except Exception as error:  # whatever the compiler raises: the others are still to be seen
                    text = str(error).strip().splitlines() or [""]
                    compiled.failures.append(f"{name}: {type(error).__name__}: {text[-1]}")
                    print(f"FAILED {compiled.failures[-1]}", flush=True)
    print(f"{len(compiled.seen)} kernels, {len(compiled.failures)} failures")
    for failure in compiled.failures:
        print(f"FAILED {failure}")
    return 1 if compiled.failures else 0


if __name__ == "__main__":
    sys.exit(main())
