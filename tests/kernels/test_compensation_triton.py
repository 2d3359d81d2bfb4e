"""Kernels of compensated rows against plain torch, bit for bit. Under the interpreter unless there is a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.formats import get_format
from tracefp4.kernels.compensation import FACTS, chosen_outputs, compensated_rows
from tracefp4.kernels.compensation.ref import LANES, column_sums
from tracefp4.kernels.errors import KernelError
from tracefp4.recipe import Compensation, QuantRecipe
from tracefp4.rollout.compensation import ResidualCompensation

pytest.importorskip("triton", reason="triton is not installed: its kernels are not tested")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, for Inf and NaN under the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RULES, SELECTIONS = ("quads", "resq"), ("channels", "row", "2:4")


def rows(N: int, I: int, seed: int = 0) -> Tensor:
    """BF16 [N, I] with outlier channels; whole values, so that there are equal ones; a row of zeros."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(N, I, generator=g) * torch.randn(I, generator=g).exp() * 8).round()
    x[:: N // 2 + 1] = 0
    return x.bfloat16().to(DEVICE)


def both(
    x: Tensor, c: Compensation, scale: str = "row-pow2", format: str = "nvfp4", real: Tensor | None = None,
    factors: tuple[Tensor, Tensor] | None = None, calls: int = 1,
) -> None:  # fmt: skip
    """The kernel's operand, epilogue and sums are those of torch. factors: what x is the rounded product of."""
    recipe = QuantRecipe(2, format, format, "nvfp4", encode_scale=scale, compensation=c)
    plain, kernel = (ResidualCompensation.of(recipe, backend) for backend in ("torch", "triton"))
    assert plain is not None
    assert kernel is not None
    assert kernel.fused
    fmt = get_format(format)
    blocks = fmt.quantize(x, encode_scale=scale)
    each = None if real is None else real.repeat_interleave(len(x) // len(real))
    want = plain.operand(x, blocks, *fmt.operands(blocks, dtype=torch.float32), each)
    for _ in range(calls):
        got = kernel.rows(*(factors or (x, None)), real)
        for a, b in zip(got, want, strict=True):
            assert b is not None
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    for _ in range(calls - 1):
        plain.residual(x, blocks, each)
    # FP64 sums of 3 x N x I squares in another order.
    assert kernel.metrics() == pytest.approx(plain.metrics(), rel=2 * x.numel() * 2.0**-53, abs=0)
    assert kernel.metrics() == {}


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("scale", "format"), [("row-pow2", "nvfp4"), ("row", "nvfp4"), ("row", "nvfp4-exact")])
def test_rows_are_those_of_torch(scale: str, format: str, rule: str, selection: str) -> None:
    both(rows(9, 208), Compensation(rule, selection), scale, format)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("N", "I"), [(1, 16), (3, 512)])
def test_sizes(N: int, I: int, selection: str) -> None:
    both(rows(N, I), Compensation("quads", selection))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_products_and_padding(rule: str, selection: str) -> None:
    """The down projection's input: a product of factors in wider rows, two rows for each that is real or padding."""
    g = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(10, 192, generator=g) * 3).to(DEVICE).chunk(2, dim=-1)
    real = torch.tensor([True, True, False, True, False], device=DEVICE)
    both((gate * up).bfloat16(), Compensation(rule, selection), real=real, factors=(gate, up), calls=2)


@pytest.mark.parametrize("share", [0.01, 0.25, 0.8, 1.0])
@pytest.mark.parametrize("selection", ["channels", "row"])
def test_shares(selection: str, share: float) -> None:
    both(rows(6, 80), Compensation("quads", selection, share))


def test_more_rows_than_lanes() -> None:
    both(rows(LANES + 9, 16), Compensation("resq"))


@pytest.mark.parametrize("selection", SELECTIONS)
def test_more_rows_than_programs(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracefp4.kernels.compensation.triton.FACTS", 4)
    both(rows(11, 32), Compensation("resq", selection))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_equal_residuals(rule: str, selection: str) -> None:
    """Channels of one residual, in one block and in all: the first ones are kept."""
    x = torch.tensor([6.0, 5.5, 5.5, 5.5, 2.25, 2.25, 5.5, 5.5]).repeat(3, 8).bfloat16().to(DEVICE)
    both(x, Compensation(rule, selection))


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("rule", RULES)
def test_values_that_are_no_numbers(rule: str, selection: str) -> None:
    """NaN and Inf go where torch lets them go; subnormal and huge rows too."""
    x = rows(6, 64)
    x[1] *= 2.0**-130
    x[2] *= 2.0**115
    x[3, 5], x[4, 40], x[4, 41] = float("nan"), float("inf"), float("-inf")
    recipe = QuantRecipe(2, "nvfp4", "nvfp4", "nvfp4", compensation=Compensation(rule, selection))
    plain, kernel = (ResidualCompensation.of(recipe, backend) for backend in ("torch", "triton"))
    assert plain is not None
    assert kernel is not None
    fmt = get_format("nvfp4")
    blocks = fmt.quantize(x, encode_scale="row-pow2")
    want = plain.operand(x, blocks, *fmt.operands(blocks, dtype=torch.float32))
    got = kernel.rows(x)
    for a, b in zip(got, want, strict=True):
        assert b is not None
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


def test_column_sums() -> None:
    """Their order is that of LANES: rows behind the last one that are zero change no bit."""
    x = torch.rand(2 * LANES + 7, 48, generator=torch.Generator().manual_seed(0))
    got = column_sums(x)
    assert torch.equal(column_sums(torch.cat([x, torch.zeros(3 * LANES, 48)])), got)
    lanes = [x[n::LANES] for n in range(LANES)]
    sums = []
    for lane in lanes:
        total = torch.zeros(48)
        for row in lane:
            total = total + row
        sums.append(total)
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    assert torch.equal(sums[0][None], got)
    torch.testing.assert_close(got[0].double(), x.double().sum(0), rtol=20 * 2.0**-24, atol=0)
    assert column_sums(torch.zeros(0, 48)).tolist() == [[0.0] * 48]


@pytest.mark.parametrize("epilogues", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("every", [True, False])
def test_chosen_outputs(every: bool, epilogues: tuple[bool, bool]) -> None:
    """Of tokens' rows, and of a row for every choice; outputs of any strides."""
    g = torch.Generator().manual_seed(2)
    E, N, K, O = 4, 5, 2, 136
    chosen = torch.randint(0, E, (N, K), generator=g).to(DEVICE)
    M = N * K if every else N
    y = torch.randn(E, O, M, generator=g).to(DEVICE).transpose(1, 2)
    of_experts = torch.rand(E, generator=g).to(DEVICE) if epilogues[0] else None
    for of_rows in (torch.rand(M, 1, generator=g).to(DEVICE), torch.tensor(0.3, device=DEVICE)):
        given: tuple[Any, ...] = (chosen, of_experts, of_rows if epilogues[1] else None, torch.bfloat16)
        for layout in (y, y.contiguous()):
            want = chosen_outputs(layout, *given, backend="torch")
            assert torch.equal(chosen_outputs(layout, *given, backend="triton"), want)
            wide = chosen_outputs(layout, *given, backend="triton", widened=True)
            assert torch.equal(wide, want.float())
            assert wide.dtype == torch.float32
    for m, e in enumerate(chosen.flatten().tolist()):  # the last of those, by hand
        row = y[e, m if every else m // K]
        row = row if of_experts is None else row * of_experts[e]
        assert torch.equal(want[m], (row * of_rows if epilogues[1] else row).bfloat16())


def test_what_does_not_fit_is_refused() -> None:
    facts, x = torch.zeros(FACTS, 3, dtype=torch.float64, device=DEVICE), rows(4, 32)
    form: dict[str, Any] = {"format": "nvfp4", "encode_scale": "row", "rule": "quads", "selection": "row", "kept": 4}
    assert compensated_rows(x[:0], None, None, facts, **form)[0].shape == (0, 32)
    for change, what in (
        ({"x_NI": x[:, :24]}, "a multiple of 16"),
        ({"x_NI": x.T.contiguous().T}, "contiguous rows"),
        ({"up_NI": x[:2]}, "up must be"),
        ({"up_NI": x}, "factors of x must be FP32"),
        ({"real": torch.ones(3, dtype=torch.bool, device=DEVICE)}, "real must be"),
        ({"facts": facts.float()}, "facts must be"),
        ({"format": "mxfp4-rceil"}, "no kernel compensates"),
        ({"encode_scale": "tensor"}, "no kernel compensates"),
        ({"rule": "none"}, "no such selection"),
        ({"kept": 33}, "no such selection"),
    ):
        given: dict[str, Any] = {"x_NI": x, "up_NI": None, "real": None, "facts": facts, **form, **change}
        with pytest.raises(KernelError, match=what):
            compensated_rows(**given)
    y, chosen = torch.zeros(2, 3, 16, device=DEVICE), torch.zeros(3, 2, dtype=torch.int64, device=DEVICE)
    for change, what in (
        ({"y_ENO": y[:, :2]}, "y must be"),
        ({"chosen_NK": chosen.int()}, "chosen must be"),
        ({"epilogue_E": torch.ones(3, device=DEVICE)}, "experts' epilogue"),
        ({"epilogue_N1": torch.ones(2, 1, device=DEVICE)}, "rows' epilogue"),
    ):
        given = {"y_ENO": y, "chosen_NK": chosen, "epilogue_E": None, "epilogue_N1": None, **change}
        with pytest.raises(KernelError, match=what):
            chosen_outputs(**given, dtype=torch.bfloat16, backend="triton")
