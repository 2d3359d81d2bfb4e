"""Routed experts in Triton against the torch reference; under the interpreter unless there is a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.kernels.errors import KernelError
from tracefp4.kernels.grouped_experts import PackedExperts, routed_experts
from tracefp4.kernels.quantize_record import RecordTarget, payload_rows, quantize_record
from tracefp4.recipe import quantize_expert_weights

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(N: int, E: int, K: int, hidden: int, width: int, packed: bool) -> dict[str, Any]:
    """Random weights and activations; some experts are chosen by nobody, one by every token."""
    g = torch.Generator().manual_seed(N + E)
    x = (torch.randn(N, hidden, generator=g) * torch.rand(N, 1, generator=g).exp()).bfloat16()
    scores = torch.randn(N, E, generator=g)
    scores[:, 0], scores[:, 1] = 9.0, -9.0
    gates, experts = scores.softmax(-1).topk(K, dim=-1)
    weights = [torch.randn(E, o, i, generator=g) / i**0.5 for o, i in ((2 * width, hidden), (hidden, width))]
    both: list[Any] = [w.bfloat16() for w in weights]
    if packed:
        both = [PackedExperts.pack(quantize_expert_weights(w.bfloat16(), "nvfp4")) for w in weights]
    return {"x": x, "experts_NK": experts, "gates_NK": gates, "gate_up": both[0], "down": both[1]}


def on(device: str, args: dict[str, Any]) -> dict[str, Any]:
    def move(v: Any) -> Any:
        if isinstance(v, PackedExperts):
            return PackedExperts(v.words.to(device), v.scales.to(device), v.epilogue.to(device), v.format)
        return v.to(device)

    return {k: move(v) for k, v in args.items()}


CASES = {
    "W4A4": (True, "nvfp4", "row"),
    "W4A4, powers of two, exact rule": (True, "nvfp4-exact", "row-pow2"),
    "W4A4, static": (True, "nvfp4", 300.0),
    "W4A16": (True, None, "row"),
    "BF16": (False, None, "row"),
}


def close(got: Tensor, want: Tensor) -> None:
    """Sums differ in order only; a hidden value on a rounding boundary may then fall into the neighbouring slot."""
    got, want = got.float().cpu(), want.float().cpu()
    assert torch.isfinite(got).all()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-6)
    assert float(error.max()) < 2e-2
    assert float(error.median()) < 3e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("N", "E", "K", "hidden", "width"), [(1, 4, 2, 128, 128), (18, 3, 2, 256, 128)])
def test_equals_the_reference(case: str, N: int, E: int, K: int, hidden: int, width: int) -> None:
    packed, activations, scale = CASES[case]
    args = problem(N, E, K, hidden, width, packed)
    options: dict[str, Any] = {"activations": activations, "encode_scale": scale}
    got = routed_experts(**on(DEVICE, args), backend="triton", **options)
    close(got, routed_experts(**args, backend="torch", **options))


@pytest.mark.skipif(DEVICE == "cpu", reason="under the interpreter nothing is laid out over lanes")
@pytest.mark.parametrize("N", [520, 1100])
def test_many_rows_of_a_narrow_model(N: int) -> None:
    """Rows of 128 beside a routing of 1024 and more choices: Triton 3.6 once summed over wrong lanes here."""
    args = problem(N, 8, 2, 128, 128, True)
    got = routed_experts(**on(DEVICE, args), backend="triton", activations="nvfp4", encode_scale="row-pow2")
    close(got, routed_experts(**args, backend="torch", activations="nvfp4", encode_scale="row-pow2"))


@pytest.mark.parametrize("case", ["W4A4", "BF16"])
@pytest.mark.parametrize(("outputs", "down", "tails", "bulk"), [(64, 128, 2, False), (128, 64, 1, True)])
def test_strips_give_the_same_bits(case: str, outputs: int, down: int, tails: int, bulk: bool) -> None:
    """However products are cut into strips, every sum has the same terms in the same order.

    18 rows on two of the experts, 0 on one: whole blocks, and last ones that a half or a quarter of a strip takes.
    """
    strips_against_pieces(case, outputs, 16, down, tails, bulk)


@pytest.mark.parametrize(("outputs", "rows", "down", "tails", "parts"), [(64, 24, 64, 1, 4), (256, 12, 128, 0, 1)])
def test_strips_of_two_widths_and_past_the_end(outputs: int, rows: int, down: int, tails: int, parts: int) -> None:
    """Blocks of 16 + 8 rows, 18 of which exist, and of 8 + 4 with a rest of 6; 256 outputs where there are 128."""
    strips_against_pieces("W4A4", outputs, rows, down, tails, False, parts)


def strips_against_pieces(
    case: str, outputs: int, rows: int, down: int, tails: int, bulk: bool, parts: int = 2
) -> None:
    from tracefp4.kernels.grouped_experts import triton as kernel

    packed, activations, scale = CASES[case]
    args = on(DEVICE, problem(18, 3, 2, 128, 128, packed))
    operands = [args[k] for k in ("x", "experts_NK", "gates_NK", "gate_up", "down")]
    asm = DEVICE == "cuda"
    plain = kernel.ExpertsConfig(128, 16, 4, 2, 64, asm)
    cut = kernel.ExpertsConfig(
        outputs,
        rows,
        4,
        2,
        64,
        asm,
        down=down,
        strips=True,
        tails=tails,
        bulk=bulk,
        parts=parts,
        unroll=max(1, parts // 2),
    )
    want, got = (kernel.routed_experts(*operands, activations, scale, c) for c in (plain, cut))
    assert torch.equal(got, want)


@pytest.mark.parametrize("bulk", [False, True])
def test_dense_inputs_that_no_step_divides(bulk: bool) -> None:
    """72 and 40 inputs in steps of 64: what lies past a row is the next one's, and counts for nothing."""
    from tracefp4.kernels.grouped_experts import triton as kernel

    args = on(DEVICE, problem(9, 4, 2, 72, 40, False))
    operands = [args[k] for k in ("x", "experts_NK", "gates_NK", "gate_up", "down")]
    config = kernel.ExpertsConfig(64, 16, 4, 2, 64, DEVICE == "cuda", bulk=bulk)
    close(kernel.routed_experts(*operands, None, "row", config), routed_experts(**args, backend="torch"))


def test_the_same_again() -> None:
    """No atomics: equal bits each time, and from blocks that exist already."""
    args = on(DEVICE, problem(9, 4, 2, 128, 128, True))
    a = routed_experts(**args, backend="triton", activations="nvfp4")
    b = routed_experts(**args, backend="triton", activations="nvfp4")
    blocks = get_format("nvfp4").quantize(args["x"], encode_scale="row")
    c = routed_experts(**args | {"x": blocks}, backend="triton", activations="nvfp4")
    assert torch.equal(a, b)
    assert torch.equal(a, c)


def targets(N: int, K: int, bits: float, scales: bool) -> RecordTarget:
    """A record of N rows with one slot left out and one row skipped, columns of a wider buffer."""
    blocks = get_format("nvfp4").quantize(torch.ones(1, K), encode_scale=1.0)
    width = payload_rows(blocks, bits).shape[1]
    payload = torch.full((N + 2, width + 3), 99, dtype=torch.uint8, device=DEVICE)[:, 1 : width + 1]
    slots = torch.arange(N, 0, -1, device=DEVICE)
    slots[1] = -1
    scale = torch.full((N + 2, 2), 99.0, device=DEVICE)[:, 1] if scales else None
    return RecordTarget(payload, slots, bits, scale)


def recorded(target: RecordTarget) -> list[Tensor]:
    return [t.clone() for t in (target.payload, target.encode_scale) if t is not None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN under the interpreter
@pytest.mark.parametrize("bits", [4.5, 1.5, 1.125, 1.0625, 0.125])
@pytest.mark.parametrize(("format", "scale"), [("nvfp4", "row"), ("nvfp4-exact", "row-pow2"), ("nvfp4", 37.5)])
def test_rows_quantized_recorded_and_laid_out_at_once(format: str, scale: Any, bits: float) -> None:
    """The bits and the record of quantizing first: over all magnitudes, zeros of both signs, Inf and NaN."""
    from tracefp4.kernels.grouped_experts import triton as kernel

    g = torch.Generator().manual_seed(7)
    x = torch.randn(7, 384, generator=g) * torch.tensor([1, 1e-38, 3e38, 1, 1, 1e3, 1])[:, None]
    x[3, ::2], x[4, ::3], x[6, 1], x[6, 2] = -0.0, float("nan"), float("inf"), float("-inf")
    x = x.bfloat16().to(DEVICE)
    at_once, first = (targets(7, 384, bits, isinstance(scale, str)) for _ in range(2))
    got = kernel.operand_rows(x, format, scale, at_once)
    want = kernel.operand_rows(quantize_record(x, format, scale, backend="triton", record=first), format)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(recorded(at_once), recorded(first), strict=True))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_experts_record_their_input(backend: str) -> None:
    args = problem(9, 4, 2, 128, 128, True)
    at_once, first = (targets(9, 128, 1.125, True) for _ in range(2))
    args = on(DEVICE, args)
    got = routed_experts(**args, backend=backend, activations="nvfp4", record=at_once)
    blocks = quantize_record(args["x"], "nvfp4", "row", backend=backend, record=first)
    want = routed_experts(**args | {"x": blocks}, backend=backend, activations="nvfp4")
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(recorded(at_once), recorded(first), strict=True))
    with pytest.raises(KernelError, match="record needs BF16"):
        routed_experts(**args | {"x": blocks}, backend=backend, activations="nvfp4", record=at_once)
    with pytest.raises(KernelError, match="record needs BF16"):
        routed_experts(**args, backend=backend, record=at_once)
    with pytest.raises(KernelError, match="slots must be"):
        routed_experts(**args, backend=backend, activations="nvfp4", record=targets(8, 128, 1.125, True))


def test_operands_are_exact() -> None:
    """One expert, unit weights: products with every code at every scale come out as they are."""
    from tracefp4.kernels.grouped_experts import triton as kernel

    codes = torch.arange(256, dtype=torch.uint8).view(4, 64).repeat(32, 1)
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=0x7E).view(128, 1).expand(128, 8).contiguous()
    blocks = QuantizedBlocks(codes[None], scales[None], torch.tensor(1.0), "nvfp4", (1, 128, 128))
    packed = PackedExperts.pack(blocks)
    assert all(torch.equal(a, b) for a, b in zip(packed.unpack(), (blocks.codes, blocks.scales), strict=True))
    unit = torch.eye(128).bfloat16().to(DEVICE)
    rows, factor = kernel.operand_rows(unit)
    experts = torch.zeros(128, 1, dtype=torch.int64, device=DEVICE)
    config = kernel.default_config(True, 128.0)
    routing = kernel.route(experts, 1, config.rows)
    weights = on(DEVICE, {"w": packed})["w"]
    y = kernel.products(rows, factor, weights, routing, 1, False, 128, config)
    assert torch.equal(y.float().cpu().T, get_format("nvfp4").dequantize(blocks)[0])


@pytest.mark.parametrize(
    ("N", "E", "K", "rows"), [(1, 3, 1, 8), (300, 7, 2, 16), (40, 128, 8, 8), (700, 9, 6, 16), (512, 128, 8, 64)]
)
def test_routing_is_the_stable_sort(N: int, E: int, K: int, rows: int) -> None:
    from tracefp4.kernels.grouped_experts import triton as kernel

    g = torch.Generator().manual_seed(N)
    experts = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(N)])
    experts[experts == 2] = 0  # nobody's
    routing = kernel.route(experts.to(DEVICE), E, rows)
    flat = experts.flatten()
    assert torch.equal(routing.order.cpu().long(), torch.argsort(flat, stable=True))
    counts = torch.bincount(flat, minlength=E)
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).tolist()
    want = [(e, i, min(rows, first[e + 1] - i)) for e in range(E) for i in range(first[e], first[e + 1], rows)]
    table = [entry for entry in routing.table.tolist() if entry != -1]
    assert [(entry >> 48, entry & 0xFFFFFFFF, entry >> 32 & 0xFFFF) for entry in table] == want


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_sum_may_be_left_out(backend: str) -> None:
    args = on(DEVICE, problem(5, 4, 2, 128, 128, True))
    want = routed_experts(**args, backend=backend, activations="nvfp4")
    rows = routed_experts(**args, backend=backend, activations="nvfp4", summed=False)
    assert rows.shape == (5, 2, 128)
    total = (rows.float() * args["gates_NK"][..., None]).sum(1)
    assert torch.equal(total.bfloat16(), want)


def test_no_tokens() -> None:
    args = on(DEVICE, problem(1, 4, 2, 128, 128, True))
    args |= {k: args[k][:0] for k in ("x", "experts_NK", "gates_NK")}
    assert routed_experts(**args, backend="triton", activations="nvfp4").shape == (0, 128)


def test_bad_operands_are_refused_by_name() -> None:
    args = on(DEVICE, problem(2, 4, 2, 128, 128, True))
    with pytest.raises(KernelError, match="int64"):
        routed_experts(**args | {"experts_NK": args["experts_NK"].int()}, backend="triton")
    with pytest.raises(KernelError, match="follow"):
        routed_experts(**args | {"down": args["gate_up"]}, backend="triton")
    with pytest.raises(KernelError, match="mxfp4"):
        routed_experts(**args, backend="triton", activations="mxfp4-floor")
    dense = on(DEVICE, problem(2, 4, 2, 128, 128, False))
    with pytest.raises(KernelError, match="packed weights"):
        routed_experts(**dense, backend="triton", activations="nvfp4")
    with pytest.raises(KernelError, match="multiple of 128"):
        PackedExperts.pack(quantize_expert_weights(torch.randn(2, 32, 64).bfloat16(), "nvfp4"))
