"""Registry, shapes and refusals that all formats share."""

import dataclasses

import pytest
import torch

from tracefp4.formats import FormatError, QuantizedBlocks, get_format, list_formats

EVERY = list_formats()


def test_names() -> None:
    assert EVERY == [
        "nvfp4",
        "nvfp4-exact",
        "nvfp4-4over6",
        "nvfp4-4over6-mae",
        "nvfp4-4over6-448-mse",
        "nvfp4-4over6-448-mae",
        "mxfp4-floor",
        "mxfp4-even",
        "mxfp4-rceil",
        "mxfp4-ceil",
        "mxfp8-floor",
        "mxfp8-even",
        "mxfp8-rceil",
        "mxfp8-ceil",
    ]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("nvpf4", "nvfp4"), ("mxfp4", "mxfp4-"), ("nvfp4_exact", "nvfp4-exact"), ("", "nvfp4")],
)
def test_unknown_name_suggests_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(FormatError, match=f"did you mean '{right}"):
        get_format(wrong)


@pytest.mark.parametrize("name", EVERY)
def test_format_is_frozen_data(name: str) -> None:
    fmt = get_format(name)
    assert fmt.name == name
    assert (fmt.block_size, fmt.scale_kind) == ((16, "e4m3") if name.startswith("nv") else (32, "e8m0"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.block_size = 8  # type: ignore[misc]
    assert dataclasses.replace(fmt) == fmt
    assert isinstance(hash(fmt), int)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (0, 64), (2, 1, 96), (2, 3, 2, 32)])
def test_shapes(name: str, shape: tuple[int, ...]) -> None:
    fmt = get_format(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    blocks = fmt.quantize(x)
    assert blocks.shape == shape
    assert blocks.format == name
    assert blocks.block_size == fmt.block_size
    assert blocks.codes.shape == (*shape[:-1], shape[-1] * fmt.element_bits // 8)
    assert blocks.scales.shape == (*shape[:-1], shape[-1] // fmt.block_size)
    assert blocks.unpacked_codes().shape == shape
    assert fmt.dequantize(blocks).shape == shape
    assert fmt.operands(blocks)[0].shape == shape
    assert fmt.block_amax(x).shape == blocks.scales.shape


@pytest.mark.parametrize("name", EVERY)
def test_strided_input(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)).t()
    a, b = fmt.quantize(x), fmt.quantize(x.contiguous())
    assert torch.equal(a.codes, b.codes)
    assert torch.equal(fmt.dequantize(a), fmt.dequantize(b))
    cut = QuantizedBlocks(b.codes.t().contiguous().t(), b.scales, b.encode_scale, name, b.shape)
    assert torch.equal(fmt.dequantize(cut), fmt.dequantize(b))


@pytest.mark.parametrize("name", EVERY)
def test_bad_input_is_refused(name: str) -> None:
    fmt = get_format(name)
    with pytest.raises(FormatError, match=f"last dimension 40 .* block size {fmt.block_size}"):
        fmt.quantize(torch.ones(2, 40))
    for empty in (torch.ones(2, 0), torch.ones(())):
        with pytest.raises(FormatError, match="last dimension 0"):
            fmt.quantize(empty)
    for dtype in (torch.int32, torch.uint8, torch.bool, torch.complex64):
        with pytest.raises(FormatError, match="floating"):
            fmt.quantize(torch.ones(32, dtype=dtype))


def test_blocks_of_another_format_are_refused() -> None:
    blocks = get_format("nvfp4").quantize(torch.ones(32))
    with pytest.raises(FormatError, match="'nvfp4', not 'nvfp4-4over6'"):
        get_format("nvfp4-4over6").dequantize(blocks)
    with pytest.raises(FormatError, match="not 'nvfp4-exact'"):
        get_format("nvfp4-exact").operands(blocks)


def test_blocks_check_their_parts() -> None:
    blocks = get_format("nvfp4").quantize(torch.ones(2, 32))
    with pytest.raises(FormatError, match="uint8"):
        dataclasses.replace(blocks, codes=blocks.codes.int())
    with pytest.raises(FormatError, match="do not fit shape"):
        dataclasses.replace(blocks, shape=(2, 64))
    with pytest.raises(FormatError, match="do not fit shape"):
        dataclasses.replace(blocks, scales=blocks.scales[:1])
    with pytest.raises(FormatError, match="do not divide"):
        dataclasses.replace(blocks, scales=torch.zeros(2, 3, dtype=torch.uint8))


@pytest.mark.parametrize("name", EVERY)
def test_rows(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(6, 4, 64, generator=torch.Generator().manual_seed(0))
    blocks, values = fmt.quantize(x), fmt.dequantize(fmt.quantize(x))
    mask = torch.tensor([True, False, True, False, False, True])
    for index in (
        0,
        slice(1, 3),
        mask,
        torch.tensor([5, 0]),
        (slice(None), 2),
        (mask, torch.tensor([0, 1, 2])),
    ):
        assert torch.equal(fmt.dequantize(blocks.rows(index)), values[index])
    with pytest.raises(FormatError, match="leading dimensions"):
        blocks.rows((0, 0, slice(0, 1)))


def test_rows_with_a_shared_encode_scale() -> None:
    fmt = get_format("nvfp4")
    x = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(0))
    for given in ("tensor", torch.rand(3, 1, 1) + 1, torch.rand(2, 1) + 1):
        blocks = fmt.quantize(x, given)
        assert torch.equal(fmt.dequantize(blocks.rows((2, 1))), fmt.dequantize(blocks)[2, 1])


def test_tables_are_real_under_a_meta_default_device() -> None:
    from tracefp4.formats import e2m1

    e2m1._codes_by_top_bits.cache_clear()
    with torch.device("meta"):
        blocks = get_format("nvfp4").quantize(torch.ones(32, device="cpu"), 1.0)
    assert blocks.codes.device.type == "cpu"
    assert blocks.to("cpu").unpacked_codes().tolist() == [7] * 32
