"""Cases of routed experts: FP4 weights with FP4 and BF16 activations against BF16, over a whole layer's MLP."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.bench.registry import Case, Inputs
from tracefp4.kernels.grouped_experts import PackedExperts, routed_experts

HIDDEN, WIDTH, EXPERTS, TOP = 2048, 768, 128, 8  # Qwen3-30B-A3B
Size = tuple[int, int, int, int]


def choice(N: int, E: int, K: int) -> tuple[Tensor, Tensor]:
    """(experts int64 [N, K], gates f32 [N, K]) of a router without favourites."""
    scores = torch.randn(N, E, generator=torch.Generator().manual_seed(N))
    gates, experts = scores.softmax(-1).topk(K, dim=-1)
    return experts, gates / gates.sum(-1, keepdim=True)


def _packed(E: int, O: int, I: int, device: torch.device) -> PackedExperts:
    words = torch.empty(E, I // 128, O, 16, dtype=torch.int32, device=device)
    words.view(torch.uint8).random_(0, 256)  # any bits are codes
    scales = torch.empty(E, I // 128, O, 8, dtype=torch.uint8, device=device).random_(0x30, 0x40)  # .5 to 1.9
    return PackedExperts(words, scales, torch.full((E,), 2.0**-7, device=device))


def make(N: int, kind: str, device: torch.device, size: Size) -> Inputs:
    hidden, width, E, K = size
    experts, gates = choice(N, E, K)
    weights: list[Any] = []
    for o, i in ((2 * width, hidden), (hidden, width)):
        if kind == "BF16":
            weights.append(torch.empty(E, o, i, dtype=torch.bfloat16, device=device).normal_(std=i**-0.5))
        else:
            weights.append(_packed(E, o, i, device))
    return {
        "x": torch.randn(N, hidden, device=device).bfloat16(),
        "experts_NK": experts.to(device),
        "gates_NK": gates.to(device),
        "gate_up": weights[0],
        "down": weights[1],
        "activations": "nvfp4" if kind == "W4A4" else None,
    }


def run(inputs: Inputs, config: Any = None) -> Tensor:
    if config is None:
        return routed_experts(**inputs, backend="triton")
    from tracefp4.kernels.grouped_experts import triton as kernel

    i = inputs
    return kernel.routed_experts(
        i["x"], i["experts_NK"], i["gates_NK"], i["gate_up"], i["down"], i["activations"], "row", config
    )


def check(inputs: Inputs, config: Any = None) -> str:
    """Rows against the torch reference: sums differ in order only, which moves a few values to the next slot."""
    inputs["x"].normal_()
    got, want = run(inputs, config).float(), routed_experts(**inputs, backend="torch").float()
    error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).nan_to_num(torch.inf)
    worst, median = float(error.max()), float(error.median())
    assert worst < 2e-2, f"worst row off by {worst:.2g}, median {median:.2g}"
    assert median < 5e-3, f"worst row off by {worst:.2g}, median {median:.2g}"
    return f"rows off by {median:.1e}, worst {worst:.1e}"


def _bytes(N: int, kind: str, size: Size) -> int:
    """Weights of the experts that are chosen, each once, and x and the result."""
    hidden, width, E, K = size
    chosen = choice(N, E, K)[0].unique().numel()
    return int(chosen * 3 * hidden * width * (2 if kind == "BF16" else 9 / 16) + 4 * N * hidden)


def _case(N: int, kind: str, size: Size, config: Any = None, config_name: str = "") -> Case:
    hidden, width, _, K = size
    label = f"{N} tokens, {size[2]} experts, top {K}"
    return Case(
        op="grouped_experts",
        name=f"{label}, {kind}{config_name}",
        bytes_moved=_bytes(N, kind, size),
        operations=6 * N * K * hidden * width,
        make=lambda device: make(N, kind, device, size),
        run=lambda inputs: run(inputs, config),
        check=lambda inputs: check(inputs, config),
        group=f"experts, {label}",
        baseline=kind == "BF16",
    )


def _torch_inputs(N: int, device: torch.device, size: Size) -> Inputs:
    """Rows sorted and gathered beforehand: only the two products and SiLU are timed."""
    hidden, _, E, K = size
    inputs = make(N, "BF16", device, size)
    flat = inputs["experts_NK"].flatten()
    return {
        "rows": torch.randn(N * K, hidden, device=device).bfloat16(),
        "offsets": torch.bincount(flat, minlength=E).cumsum(0).int(),
        "gate_up": inputs["gate_up"].transpose(1, 2),
        "down": inputs["down"].transpose(1, 2),
    }


def _torch_run(i: Inputs) -> Tensor:
    gate, up = F.grouped_mm(i["rows"], i["gate_up"], offs=i["offsets"]).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, i["down"], offs=i["offsets"])


def _torch_case(N: int, size: Size) -> Case:
    label = f"{N} tokens, {size[2]} experts, top {size[3]}"
    return Case(
        op="grouped_experts",
        name=f"{label}, BF16 by torch grouped_mm, sorted beforehand",
        bytes_moved=_bytes(N, "BF16", size),
        operations=6 * N * size[3] * size[0] * size[1],
        make=lambda device: _torch_inputs(N, device, size),
        run=_torch_run,
        check=None,
        group=f"experts, {label}",
    )


def cases(small: bool, sweep: bool) -> list[Case]:
    """small: shapes for the interpreter. sweep: only several cuts of the work."""
    if small:
        return [_case(3, kind, (128, 128, 4, 2)) for kind in ("BF16", "W4A4", "W4A16")]
    size = (HIDDEN, WIDTH, EXPERTS, TOP)
    if sweep:
        return [_configured(N, kind, size, c) for N, kind, settings in SWEEP for c in settings]
    found = []
    for N in (16, 64, 256, 512, 4096):
        found += [_case(N, kind, size) for kind in ("BF16", "W4A4", "W4A16")]
        if hasattr(F, "grouped_mm"):
            found.append(_torch_case(N, size))
    return found


def _configured(N: int, kind: str, size: Size, setting: tuple[int, ...]) -> Case:
    from tracefp4.kernels.grouped_experts.triton import ExpertsConfig

    outputs, rows, warps, stages = setting[:4]
    inner = setting[4] if len(setting) > 4 else 64
    config = ExpertsConfig(outputs, rows, warps, stages, inner)
    name = f", {outputs} x {rows}, {warps} warps, {stages} stages"
    return _case(N, kind, size, config, name + (f", {inner} inputs" if kind == "BF16" else ""))


# Tokens, kind, and settings: output features, rows, warps, stages, and inputs a step of BF16.
# Only what came within a few percent of the default, which is a case of its own.
SWEEP: list[tuple[int, str, list[tuple[int, ...]]]] = [
    (64, "W4A4", [(64, 8, 1, 2), (128, 8, 2, 3)]),
    (64, "BF16", [(64, 16, 4, 3, 128), (32, 8, 2, 4, 128)]),
    (512, "W4A4", [(128, 32, 4, 3)]),
    (4096, "W4A4", [(128, 64, 8, 3)]),
]
