"""Cases of one-pass quantization with recording."""

from __future__ import annotations

from typing import Any

import torch

from tracefp4.bench.registry import Case, Inputs
from tracefp4.formats import QuantizedBlocks, decode_e4m3
from tracefp4.kernels.paged_attention import PagedCache
from tracefp4.kernels.quantize_record import RecordTarget, quantize_record, write_kv
from tracefp4.kernels.quantize_record.ref import planes


def _row_bytes(K: int, bits: float) -> int:
    code_planes, scale_planes = planes("nvfp4", bits)
    return code_planes * -(-K // 8) + scale_planes * -(-K // 16 // 8)


def _target(N: int, K: int, bits: float, device: torch.device, row_scale: bool) -> RecordTarget:
    payload = torch.full((2 * N, _row_bytes(K, bits)), 0xFF, dtype=torch.uint8, device=device)
    scale = torch.full((2 * N,), float("nan"), device=device) if row_scale else None
    return RecordTarget(payload, torch.randperm(2 * N, device=device)[:N], bits, scale)


def _awkward(N: int, K: int, device: torch.device) -> torch.Tensor:
    """BF16 over all magnitudes: normal rows of many sizes, some zeros, NaN and Inf."""
    g = torch.Generator(device).manual_seed(2)
    x = torch.randn(N, K, generator=g, device=device)
    x *= 2.0 ** torch.randint(-30, 30, (N, 1), generator=g, device=device)
    x[1::97] = 0.0
    x[2::97, ::5] = float("nan")
    x[3::97, 1] = float("inf")
    x[4::97] *= 1e-38
    return x.bfloat16()


def _rows(N: int, K: int, bits: float, device: torch.device) -> Inputs:
    return {"x_NK": _awkward(N, K, device), "encode_scale": "row", "record": _target(N, K, bits, device, True)}


def _run_rows(inputs: Inputs, backend: str = "triton") -> QuantizedBlocks:
    i = inputs
    return quantize_record(i["x_NK"], i.get("format", "nvfp4"), i["encode_scale"], backend=backend, record=i["record"])


def _same(a: QuantizedBlocks, b: QuantizedBlocks, what: str) -> None:
    for name in ("codes", "scales", "encode_scale"):
        x, y = getattr(a, name).cpu(), getattr(b, name).cpu()
        assert torch.equal(x, y), f"{what}: {name} differ in {int((x != y).sum())} of {x.numel()}"


def _check_rows(inputs: Inputs) -> str:
    """Codes, scales, S and payload against the CPU reference: equal bits, for both rules and three kinds of S."""
    rows = slice(0, 512)
    x = inputs["x_NK"][rows]
    for format in ("nvfp4", "nvfp4-exact"):
        for scale in ("row", "row-pow2", 37.5):
            got = quantize_record(x, format, scale, backend="triton")
            _same(got, quantize_record(x.cpu(), format, scale, backend="torch"), f"{format}, {scale}")
    t = inputs["record"]
    got = _run_rows(inputs)
    payload, scale = t.payload.clone(), t.encode_scale.clone()
    reference = _run_rows(inputs | {"x_NK": inputs["x_NK"]}, backend="torch")
    _same(got, reference, "all rows, reference on this device")
    assert torch.equal(payload, t.payload), "payloads differ"
    assert torch.equal(scale[t.slots], t.encode_scale[t.slots]), "recorded scales differ"
    return "equal bits"


def _grid(device: torch.device) -> torch.Tensor:
    """f32 rows whose blocks hold every cell end of E2M1 and its neighbours, at every E4M3 scale and around each."""
    ends = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    z = torch.cat([ends, ends.nextafter(ends * 0), ends.nextafter(ends * 9), torch.tensor([0.0, -0.0, 7.0])])
    z = torch.nn.functional.pad(torch.cat([z, -z]), (0, 12)).view(4, 15)
    sf = decode_e4m3(torch.arange(0, 127, dtype=torch.uint8))
    middle = (sf[1:] + sf[:-1]) / 2
    scales = torch.cat([sf[1:], middle, middle.nextafter(middle * 0), middle.nextafter(middle * 9)])[:496]
    blocks = torch.cat([torch.full((4, 1), 6.0), z], 1)[None] * scales[:, None, None]
    return blocks.reshape(-1, 16 * 64).to(device)


def _check_grid(inputs: Inputs) -> str:
    for format in ("nvfp4", "nvfp4-exact"):
        got = quantize_record(inputs["x_NK"], format, 1.0, backend="triton")
        _same(got, quantize_record(inputs["x_NK"].cpu(), format, 1.0, backend="torch"), format)
    return "equal bits"


def _kv(N: int, G: int, D: int, page: int, device: torch.device) -> Inputs:
    qkv = _awkward(N, (8 + 2) * G * D, device).view(N, 10 * G, D)
    slots = torch.randperm(-(-N // page) * page, device=device)[:N]
    return {
        "k_NGD": qkv[:, 8 * G : 9 * G],
        "v_NGD": qkv[:, 9 * G :],
        "cache": PagedCache.empty(-(-N // page), page, G, D, "nvfp4", device),
        "slots_N": slots,
        "encode_scales": (4.0, 0.7),
        "records": (_target(N, G * D, 1.125, device, False), _target(N, G * D, 1.125, device, False)),
    }


def _check_kv(inputs: Inputs) -> str:
    def everything() -> list[torch.Tensor]:
        return [*inputs["cache"].tensors, *(t.payload for t in inputs["records"])]

    for t in everything():
        t.fill_(-1 if t.dtype == torch.int32 else 0xFF)
    write_kv(**inputs, backend="triton")
    got = [t.clone() for t in everything()]
    write_kv(**inputs, backend="torch")
    for i, (a, b) in enumerate(zip(got, everything(), strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs in {int((a != b).sum())} of {a.numel()}"
    return "equal bits"


def cases(small: bool) -> list[Case]:
    found = [
        Case(
            op="quantize_record",
            name="every tie, every scale",
            bytes_moved=0,
            operations=0,
            make=lambda device: {"x_NK": _grid(device)},
            run=lambda i: quantize_record(i["x_NK"], "nvfp4", 1.0, backend="triton"),
            check=_check_grid,
        )
    ]
    for N, K, bits in (
        [(5, 48, 1.125)] if small else [(64, 2048, 1.125), (512, 2048, 1.125), (32768, 2048, 1.125), (32768, 2048, 4.5)]
    ):
        bytes_moved = N * (2 * K + K // 2 + K // 16 + _row_bytes(K, bits) + 16)
        make: Any = lambda d, N=N, K=K, bits=bits: _rows(N, K, bits, d)  # noqa: E731
        name = f"{N} x {K}, row scale, {bits} bits recorded"
        found.append(Case("quantize_record", name, bytes_moved, 0, make, _run_rows, _check_rows))
    for N, G, D, page in [(4, 2, 32, 16)] if small else [(64, 4, 128, 64), (32768, 4, 128, 64)]:
        K = G * D
        bytes_moved = 2 * N * (2 * K + K // 2 + K // 16 + _row_bytes(K, 1.125) + 16)
        make = lambda d, N=N, G=G, D=D, page=page: _kv(N, G, D, page, d)  # noqa: E731
        run: Any = lambda i: write_kv(**i, backend="triton")  # noqa: E731
        name = f"K and V of {N} rows, {G} heads of {D}, 1.125 bits recorded"
        found.append(Case("quantize_record", name, bytes_moved, 0, make, run, _check_kv))
    return found
