"""Cases of rounding to FP4 and back, with and without guidance, as the trainer's forward does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tracefp4.bench.registry import Case, Inputs
from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, encode
from tracefp4.kernels.guided_round import fake_quantize_rows, guided_round_rows
from tracefp4.nn.rounding import fake_quantize, fake_quantized_matrices, guided_round


def _make(N: int, K: int, bits: float, device: torch.device, stale: bool = False) -> Inputs:
    """The trainer's x is the rollout's with 2 % noise; every 16th row has no record. stale: every other one is old."""
    g = torch.Generator(device).manual_seed(3)
    x = torch.randn(N, K, generator=g, device=device)
    blocks = get_format("nvfp4").quantize(x.bfloat16(), encode_scale="row")
    row = torch.arange(N, device=device)
    record = encode(blocks, bits, valid=row % 16 != 7)
    if stale:
        record = replace(record, stale=row % 2 == 0)
    noisy = x * (1 + 0.02 * torch.randn(N, K, generator=g, device=device))
    return {"x": noisy.bfloat16(), "record": record}


_BAND = 0.06  # of `trace`


def _guided(inputs: Inputs, rule: str = "cell") -> Tensor:
    record: CompactGuidance = inputs["record"]
    assert record.encode_scale is not None
    return guided_round_rows(
        inputs["x"],
        record.payload,
        record.encode_scale,
        record.valid,
        record.header.format,
        record.header.bits,
        rule,
        band=_BAND,
        stale_N=record.stale,
    )


def _equal(a: Tensor, b: Tensor, what: str) -> None:
    different = int((a.view(torch.int16) != b.view(torch.int16)).sum())
    assert different == 0, f"{what}: {different} of {a.numel()} values differ"


def _check_guided(inputs: Inputs) -> str:
    for rule in ("cell", "bracket"):
        _equal(
            _guided(inputs, rule), guided_round(inputs["x"], inputs["record"], rule, backend="torch", band=_BAND), rule
        )
    return "equal bits"


def _check_nearest(inputs: Inputs) -> str:
    for scale in ("row", "row-pow2", 37.5):
        got: Any = fake_quantize_rows(inputs["x"], "nvfp4", scale)
        _equal(got, fake_quantize(inputs["x"], "nvfp4", scale, "torch"), str(scale))
    return "equal bits"


def _case(
    N: int, K: int, bits: float, what: str, run: Any, check: Any, reference: bool = False, stale: bool = False
) -> Case:
    record = 0 if bits == 0 else N * K * bits / 8
    return Case(
        op="guided_round",
        name=f"{N} x {K}, {what}",
        bytes_moved=int(4 * N * K + record),
        operations=0,
        make=lambda device: _make(N, K, bits or 1.125, device, stale),
        run=run,
        check=check,
        group=f"rounding {N} x {K}, {bits}",
        baseline=reference,
        graph=not reference,  # the torch reference asks the host how many rows have a record
    )


def _weights(size: tuple[int, int, int], device: torch.device) -> Inputs:
    g = torch.Generator(device).manual_seed(4)
    return {"w": torch.randn(size, generator=g, device=device, dtype=torch.bfloat16)}


def _check_weights(inputs: Inputs) -> str:
    w = inputs["w"][:4]  # the reference takes ten times the memory
    for pow2 in (False, True):
        ours, theirs = (fake_quantized_matrices([w], "nvfp4", pow2, backend)[0] for backend in ("triton", "torch"))
        _equal(ours, theirs, f"power of two {pow2}")
    return "equal bits"


def _weight_case(size: tuple[int, int, int]) -> Case:
    E, O, I = size
    return Case(
        op="guided_round",
        name=f"weights of {E} experts, {O} x {I}, to nearest at one scale each",
        bytes_moved=4 * E * O * I,
        operations=0,
        make=lambda device: _weights(size, device),
        run=lambda i: fake_quantized_matrices([i["w"]], "nvfp4", True, "triton"),
        check=_check_weights,
    )


def cases(small: bool) -> list[Case]:
    N, K = (5, 48) if small else (32768, 2048)
    found = []
    for bits in (1.125, 1.5, 4.5):
        found.append(_case(N, K, bits, f"guided at {bits} bits", _guided, _check_guided))
    what = f"guided at 1.125 bits, half of the rows in a band of {_BAND}"
    found.append(_case(N, K, 1.125, what, _guided, _check_guided, stale=True))
    found.append(_case(N, K, 0, "to nearest", lambda i: fake_quantize_rows(i["x"], "nvfp4", "row"), _check_nearest))
    found.append(_weight_case((3, 16, 48) if small else (128, 1536, 2048)))
    if not small:
        run = lambda i: guided_round(i["x"], i["record"], backend="torch")  # noqa: E731
        found.append(_case(N, K, 1.125, "guided at 1.125 bits, torch reference", run, None, reference=True))
    return found
