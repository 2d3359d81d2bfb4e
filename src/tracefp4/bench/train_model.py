"""A decoder of a named shape with random weights, and records of what its own forward rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.config import ConfigError
from tracefp4.formats import get_format
from tracefp4.guidance import CompactGuidance, encode
from tracefp4.nn import GuidanceContext, MicroBatch, TrainerForward, prepare_model
from tracefp4.recipe import QuantRecipe

UNQUANTIZED = TrainerForward()
QAT = TrainerForward(weights=True, activations=True, kv=True)
GUIDED = TrainerForward(weights=True, activations=True, kv=True, guided=True)
VALID_EVERY, NOISE = 32, 0.01
"""Rows without a record: one in so many, as last tokens and fallen-back rows are. The rollout's activations are the
trainer's times 1 + NOISE * N(0, 1)."""


@dataclass(frozen=True)
class TrainShape:
    """Sizes of the model and of a step: tokens in sequences of length, layers of Qwen3-30B-A3B unless told.

    vocab: rows of the head. A whole one of 151,936 on a few of 48 layers would take a share that it does not have in
    the model, the same in every mode, so that ratios came out nearer to 1.
    """

    layers: int = 8
    hidden: int = 2048
    experts: int = 128
    top: int = 8
    width: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    vocab: int = 1024
    tokens: int = 8192
    length: int = 2048

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.tokens % self.length:
            raise ConfigError(f"--tokens {self.tokens} is no multiple of --length {self.length}")
        for name, size in (("hidden", self.hidden), ("width", self.width), ("head-dim", self.head_dim)):
            if size % 16:
                raise ConfigError(f"--{name} {size} is no multiple of the NVFP4 block of 16")
        if self.heads % self.kv_heads:
            raise ConfigError(f"--heads {self.heads} is no multiple of --kv-heads {self.kv_heads}")
        if self.top > self.experts:
            raise ConfigError(f"--top {self.top} exceeds --experts {self.experts}")

    @property
    def name(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.experts} experts top {self.top} of width {self.width}, "
            f"heads {self.heads}/{self.kv_heads} of {self.head_dim}, {self.tokens} tokens in sequences of {self.length}"
        )

    @property
    def operations(self) -> int:
        """Of a forward and backward pass: three times the forward's products, causal attention counted by half."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        scores = self.heads * self.head_dim * self.length
        experts = self.hidden * self.experts + 3 * self.top * self.hidden * self.width
        forward = self.layers * (attention + scores + experts) + self.hidden * self.vocab
        return 3 * 2 * self.tokens * forward


def make_model(shape: TrainShape, device: torch.device, seed: int = 0) -> Any:
    """A transformers Qwen3MoeForCausalLM in BF16, its random weights drawn on the device."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,  # type: ignore[call-arg]  # read by the model, absent from its signature
        num_experts=shape.experts,
        num_experts_per_tok=shape.top,
        moe_intermediate_size=shape.width,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=max(shape.length, 64),
    )
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = Qwen3MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    module: nn.Module = model
    return module.train()


class TrainStep:
    """One model in all modes: forward, loss of the next token, backward. What a mode is lies in its context."""

    def __init__(self, shape: TrainShape, device: torch.device, backend: str = "auto", products: str = "auto") -> None:
        self.shape, self.device = shape, device
        self.model = make_model(shape, device)
        self.recipe = QuantRecipe(
            shape.layers, "nvfp4", "nvfp4", "nvfp4", guided_layers=tuple(range(shape.layers)), bits=1.125
        )
        self.context: GuidanceContext = prepare_model(self.model, self.recipe, UNQUANTIZED, backend, products)
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(0, shape.vocab, (shape.tokens // shape.length, shape.length), generator=g)
        self.ids = ids.to(device)

    def logits(self, forward: TrainerForward, guidance: dict[tuple[str, int], CompactGuidance] | None = None) -> Tensor:
        """[B, T, V] of one forward, without gradients."""
        self.context.forward = forward
        with torch.no_grad(), self.context.armed(MicroBatch(0, guidance or {})) as kwargs:
            out: Tensor = self.model(input_ids=self.ids, use_cache=False, **kwargs).logits
            return out

    def run(self, forward: TrainerForward, guidance: dict[tuple[str, int], CompactGuidance] | None = None) -> Tensor:
        """Forward and backward; leaves no gradient behind. Returns the loss on the device."""
        self.context.forward = forward
        with self.context.armed(MicroBatch(0, guidance or {})) as kwargs:
            return self._backward(self.model(input_ids=self.ids, use_cache=False, **kwargs).logits)

    def run_stock(self) -> Tensor:
        """The same by transformers' own attention and grouped experts, which know nothing of this package."""
        ours = self.model.config._attn_implementation, self.model.config._experts_implementation
        self.model.set_attn_implementation("sdpa")
        self.model.set_experts_implementation("grouped_mm")
        try:
            return self._backward(self.model(input_ids=self.ids, use_cache=False).logits)
        finally:
            self.model.set_attn_implementation(ours[0])
            self.model.set_experts_implementation(ours[1])

    def _backward(self, logits: Tensor) -> Tensor:
        logp = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        loss = -logp.gather(-1, self.ids[:, 1:, None]).mean()
        loss.backward()
        for p in self.model.parameters():
            p.grad = None
        return loss.detach()

    def records(self, noise: float = NOISE, valid_every: int = VALID_EVERY) -> dict[tuple[str, int], CompactGuidance]:
        """What a rollout that saw the same tokens would have recorded, on the device.

        The slots are those of this model's own rounded forward, its activations a little off as another engine's are;
        one row in valid_every (0: none) has no record.
        """
        found: dict[tuple[str, int], CompactGuidance] = {}
        g = torch.Generator(self.device).manual_seed(2)
        original = self.context.round_site

        def recording(site: str, layer: int, x_NK: Tensor) -> Tensor:
            x = x_NK.detach().float()
            theirs = x * (1 + noise * torch.randn(x.shape, generator=g, device=x.device)) if noise else x
            name = self.recipe.site_format(site)
            assert name is not None
            # In the compute dtype, which is what the rollout's own quantizer sees.
            blocks = get_format(name).quantize(theirs.to(x_NK.dtype), self.recipe.site_encode_scale(site))
            rows = torch.arange(len(x), device=x.device)
            valid = rows % valid_every != valid_every - 1 if valid_every else rows >= 0
            found[site, layer] = encode(blocks, self.recipe.bits, self.recipe.hash, valid)
            return original(site, layer, x_NK)

        self.context.round_site = recording  # type: ignore[method-assign]
        try:
            self.logits(QAT)
        finally:
            self.context.round_site = original  # type: ignore[method-assign]
        return found
