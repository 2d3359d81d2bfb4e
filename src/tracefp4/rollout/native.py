"""Seam for FP4 matrix units (Blackwell, SM100 and later): the experts' products by somebody's NVFP4 kernels.

UNTESTED on such hardware: nobody has run a provider below. What is tested is the seam, with a provider of torch
operations, and the layout of the scales. Attention, cache, quantization and recording are those of "triton".

Products come back as BF16 of the sum over E2M1 * SF; the encode scales follow in FP32 and are rounded once more. With
power-of-two encode scales (the default) the second rounding changes nothing.

Legend: E experts, O output and I input features, M rows of one expert, R rows and C columns of a matrix of scales.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.errors import TracefpError
from tracefp4.formats import QuantizedBlocks
from tracefp4.kernels.grouped_experts import Routing
from tracefp4.kernels.quantize_record import RecordTarget, quantize_record
from tracefp4.recipe import QuantRecipe, quantize_expert_weights
from tracefp4.rollout.kernel_model import KernelModel
from tracefp4.rollout.model import Experts, Layer, ModelShape, NativeExperts


class NativeProvider(Protocol):
    """Somebody's NVFP4 matrix product. name: as an error names it."""

    name: str

    def missing(self, device: str) -> str | None:
        """What keeps it from running on a device, as a phrase; None where nothing does."""
        ...

    def linear(self, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor) -> Tensor:
        """BF16 [M, O]: the sum over E2M1 * SF, without encode scales.

        x_codes uint8 [M, I/2], w_codes uint8 [O, I/2]; x_scales, w_scales: ``blocked_scales`` of their E4M3 bytes.
        """
        ...


def blocked_scales(scales_RC: Tensor) -> Tensor:
    """uint8 [R, C] -> flat uint8 in tiles of 128 x 4, R and C padded with zeros: the layout FP4 matrix units read.

    Within a tile byte (r, c) lies at (r mod 32) * 16 + (r div 32) * 4 + c; tiles follow row by row.
    """
    R, C = scales_RC.shape
    padded = F.pad(scales_RC, (0, -C % 4, 0, -R % 128))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _no_fp4_units(device: str) -> str | None:
    if torch.device(device).type != "cuda":
        return f"device {device} has no FP4 matrix units"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 10 else f"this GPU (SM{major}{minor}) has no FP4 matrix units, SM100 and later have"


class TorchProvider:
    """torch._scaled_mm on float4_e2m1fn_x2."""

    name = "torch"

    def missing(self, device: str) -> str | None:
        if not hasattr(torch, "float4_e2m1fn_x2"):
            return f"torch {torch.__version__} has no float4_e2m1fn_x2"
        return _no_fp4_units(device)

    def linear(self, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor) -> Tensor:
        fp4, e4m3 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
        return torch._scaled_mm(
            x_codes.view(fp4), w_codes.view(fp4).t(), x_scales.view(e4m3), w_scales.view(e4m3), out_dtype=torch.bfloat16
        )


class FlashInferProvider:
    """flashinfer.mm_fp4."""

    name = "flashinfer"

    def missing(self, device: str) -> str | None:
        if importlib.util.find_spec("flashinfer") is None:
            return "the package flashinfer-python is not installed"
        return _no_fp4_units(device)

    def linear(self, x_codes: Tensor, x_scales: Tensor, w_codes: Tensor, w_scales: Tensor) -> Tensor:
        from flashinfer import mm_fp4

        columns = -(-x_codes.shape[1] // 8 // 4) * 4
        out: Tensor = mm_fp4(
            x_codes, w_codes.t(), x_scales.view(-1, columns), w_scales.view(-1, columns).t(), out_dtype=torch.bfloat16
        )
        return out


PROVIDERS: list[NativeProvider] = [FlashInferProvider(), TorchProvider()]


def find_provider(device: str) -> NativeProvider:
    """The first provider that runs on a device. Raises TracefpError saying what each of them lacks."""
    lacks = []
    for provider in PROVIDERS:
        reason = provider.missing(device)
        if reason is None:
            return provider
        lacks.append(f"{provider.name}: {reason}")
    raise TracefpError(f'rollout.backend "native" cannot run here ({"; ".join(lacks)}); set rollout.backend="triton"')


@dataclass(frozen=True)
class _Rows:
    codes: Tensor
    scales: Tensor
    epilogue: Tensor


class NativeModel(KernelModel):
    """``KernelModel`` whose experts multiply in FP4. Asks the host for the rows of each expert: no CUDA graphs."""

    def __init__(
        self, shape: ModelShape, recipe: QuantRecipe, dtype: torch.dtype, device: str, provider: NativeProvider
    ) -> None:
        if recipe.weights is None or recipe.activations is None:
            raise TracefpError(
                'rollout.backend "native" multiplies FP4 by FP4: set quant.weights and quant.activations to "nvfp4", '
                'or rollout.backend="triton"'
            )
        super().__init__(shape, recipe, dtype, device, "triton")
        self.provider = provider

    def _expert_matrices(self, w_EOI: Tensor) -> Experts:
        assert self.recipe.weights is not None
        # One at a time: the temporaries of all would crowd the cache out.
        each = [_native(quantize_expert_weights(w[None], self.recipe.weights, self.recipe.pow2)) for w in w_EOI]
        return NativeExperts(*(torch.cat([getattr(e, f.name) for e in each]) for f in fields(NativeExperts)))

    def _replacement(self, blocks: QuantizedBlocks) -> Experts:
        return _native(blocks)

    def _experts(
        self,
        layer: Layer,
        x: Tensor | QuantizedBlocks,
        record: RecordTarget | None,
        gates: Tensor,
        chosen: Tensor,
    ) -> Tensor:
        s = self.shape
        if not isinstance(x, QuantizedBlocks):
            x = self._quantized_input(x, [] if record is None else [record])
        assert isinstance(layer.gate_up, NativeExperts)
        assert isinstance(layer.down, NativeExperts)
        routing = Routing.of(chosen, s.experts)
        up = self._linear(_rows(x, routing.token), layer.gate_up, routing.counts)
        gate, value = up.float().chunk(2, dim=-1)
        assert self.recipe.activations is not None
        scale = self.recipe.site_encode_scale("expert_input")
        hidden = quantize_record(
            (F.silu(gate) * value).bfloat16(), self.recipe.activations, scale, backend=self.backend
        )
        out = self._linear(_rows(hidden, None), layer.down, routing.counts)
        y = torch.empty_like(out)
        y[routing.order] = out
        return y.view(*chosen.shape, -1)

    def _linear(self, x: _Rows, weights: NativeExperts, counts: tuple[int, ...]) -> Tensor:
        """BF16 [M, O] of rows sorted by expert."""
        out = torch.empty(len(x.codes), weights.codes.shape[1], dtype=torch.bfloat16, device=x.codes.device)
        start = 0
        for e, n in enumerate(counts):
            if n:
                rows = slice(start, start + n)
                scales = blocked_scales(x.scales[rows])
                y = self.provider.linear(x.codes[rows], scales, weights.codes[e], weights.scales[e])
                out[rows] = (y.float() * (weights.epilogue[e] * x.epilogue[rows])).bfloat16()
            start += n
        return out


def _native(blocks: QuantizedBlocks) -> NativeExperts:
    """Of quantized weights [E, O, I] with one encode scale for all or for each expert."""
    assert blocks.encode_scale is not None
    scales = torch.stack([blocked_scales(s) for s in blocks.scales])
    epilogue = blocks.encode_scale.float().reciprocal().reshape(-1).expand(len(blocks.codes))
    return NativeExperts(blocks.codes, scales, epilogue)


def _rows(blocks: QuantizedBlocks, index: Tensor | None) -> _Rows:
    assert blocks.encode_scale is not None
    epilogue = blocks.encode_scale.float().reciprocal().expand(len(blocks.codes), 1)
    rows = _Rows(blocks.codes, blocks.scales, epilogue)
    return rows if index is None else _Rows(rows.codes[index], rows.scales[index], rows.epilogue[index])
