"""4over6: the choice, its ties and its error norms, with blocks whose errors are worked out by hand."""

import pytest
import torch

from tracefp4.formats import decode_e4m3, get_format

NAMES = ["nvfp4-4over6", "nvfp4-4over6-mae", "nvfp4-4over6-448-mse", "nvfp4-4over6-448-mae"]
ONE, ONE_AND_HALF = 0x38, 0x3C


def block(*head: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([*head, *[rest] * (16 - len(head))])


@pytest.mark.parametrize("name", NAMES)
def test_four_is_taken_for_values_in_the_gap(name: str) -> None:
    # At SF = 1: 5 ties to 4, error 1 each. At SF = 1.5: 6 -> 4 exactly, 5 / 1.5 = 3.33 -> 3 = 4.5, error .5
    # each.
    fmt = get_format(name)
    blocks = fmt.quantize(block(6.0, rest=5.0), 1.0)
    assert blocks.scales.tolist() == [ONE_AND_HALF]
    assert blocks.unpacked_codes().tolist() == [6] + [5] * 15
    assert fmt.choice(blocks).tolist() == [1]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NAMES)
def test_a_tie_takes_six(name: str) -> None:
    # 6 is 6 * 1 and 4 * 1.5: no error either way. Zeros likewise.
    fmt = get_format(name)
    blocks = fmt.quantize(torch.stack((block(6.0, -6.0), block())), 1.0)
    assert blocks.scales.tolist() == [[ONE], [0]]
    assert blocks.unpacked_codes()[:, :3].tolist() == [[7, 15, 0], [0, 0, 0]]
    assert fmt.choice(blocks).tolist() == [[0], [0]]  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "scale"), list(zip(NAMES, [ONE_AND_HALF, ONE] * 2, strict=True)))
def test_squares_and_magnitudes_may_disagree(name: str, scale: int) -> None:
    # At SF = 1 only 5 errs, by 1. At SF = 1.5, 5 errs by .5 and each of the four ones (.67 -> .5 = .75) by
    # .25: squares .25 + 4/16 < 1 take 4, magnitudes .5 + 1 > 1 take 6.
    assert get_format(name).quantize(block(6.0, 5.0, 1.0, 1.0, 1.0, 1.0), 1.0).scales.tolist() == [scale]


@pytest.mark.parametrize(("name", "constant"), list(zip(NAMES, [256, 256, 448, 448], strict=True)))
def test_encode_scale_constant(name: str, constant: int) -> None:
    s = get_format(name).resolve_encode_scale(block(3.0))
    assert s is not None
    assert s.tolist() == [constant * 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_choice_names_the_scale_of_every_normal_block(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = fmt.quantize(x)
    choice = fmt.choice(blocks)
    assert choice is not None
    assert 0.1 < choice.float().mean() < 0.6
    u = fmt.unrounded_scale(fmt.block_amax(x), blocks.encode_scale, choice)
    normal = decode_e4m3(blocks.scales) >= 2.0**-6
    # 448 leaves no room for 1.5 * SF: where that saturated, the maximum may land on 6 though 4 was taken.
    normal &= blocks.scales != 0x7E
    assert normal.float().mean() > (0.4 if "448" in name else 0.9)
    assert torch.equal(fmt.round_scale(u)[normal], blocks.scales[normal])
    six = fmt.unrounded_scale(fmt.block_amax(x), blocks.encode_scale)
    assert torch.equal(u, torch.where(choice.bool(), six * 1.5, six))
    assert torch.equal(blocks.unpacked_codes(), fmt.round_with_scales(x, blocks.scales, blocks.encode_scale))


@pytest.mark.parametrize("name", NAMES)
def test_never_worse_than_six_alone(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1))
    blocks = fmt.quantize(x)
    six = get_format("nvfp4").quantize(x, blocks.encode_scale)
    norm = 2 if name in ("nvfp4-4over6", "nvfp4-4over6-448-mse") else 1

    def error(values: torch.Tensor) -> torch.Tensor:
        return (values - x).double().abs().pow(norm).unflatten(-1, (-1, 16)).sum(-1)

    chosen, alone = error(fmt.dequantize(blocks)), error(get_format("nvfp4").dequantize(six))
    # The choice is made on FP32 sums of 16 terms: 4 halvings, a difference and a power, each within 2^-24.
    assert (chosen <= alone * (1 + 8 * 2.0**-23)).all()
    assert (chosen < alone).float().mean() > 0.2


@pytest.mark.parametrize("name", NAMES)
def test_dequantized_values_quantize_to_the_same_values(name: str) -> None:
    # A block such as (4 * 1.5, 0, ...) equals (6 * 1, 0, ...), so codes may change; values may not.
    fmt = get_format(name)
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(2))
    blocks = fmt.quantize(x, "row-pow2")
    values = fmt.dequantize(blocks)
    again = fmt.dequantize(fmt.quantize(values, blocks.encode_scale))
    normal = (decode_e4m3(blocks.scales) >= 2.0**-5) & (blocks.scales != 0x7E)
    keep = normal.repeat_interleave(16, -1)
    assert torch.equal(again[keep], values[keep])


def test_other_formats_have_no_choice() -> None:
    for name in ("nvfp4", "nvfp4-exact", "mxfp4-even"):
        fmt = get_format(name)
        blocks = fmt.quantize(torch.ones(32))
        assert fmt.choice(blocks) is None
        with pytest.raises(ValueError, match="no choice"):
            fmt.unrounded_scale(torch.ones(1), blocks.encode_scale, torch.ones(1))
