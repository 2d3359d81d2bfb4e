"""Settings of the trainer and of the losses that have some; ``method.name`` chooses the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tracefp4.config import StrictModel


class TBPOConfig(StrictModel):
    """eps_low, eps_high: the band of the geometric-mean ratio of a response of ``reference_length`` tokens is
    [1 - eps_low, 1 + eps_high]. A shorter response's is wider by sqrt(reference_length / length): the mean of n token
    log-ratios spreads like 1 / sqrt(n). reference_length 0: one band for all lengths."""

    eps_low: float = Field(3e-4, gt=0, lt=1)
    eps_high: float = Field(4e-4, gt=0, le=1e6)
    reference_length: int = Field(4096, ge=0)


class ScoreCenteringConfig(StrictModel):
    """cap: C, where the ratio p / q is truncated. top_logprobs: k, tokens of the rollout's head; the vocabulary where
    that is smaller."""

    cap: float = Field(2.0, ge=1, le=1e6)
    top_logprobs: int = Field(128, ge=1, le=1 << 20)


class TriageConfig(StrictModel):
    """delta = log p_train - log p_rollout of a token.

    gate_segment: tokens of a gated segment; its weight is severe_weight where mean delta < severe_below, mild_weight
    where it is < mild_below, else 1; and at most 1 - tail_drop * min(n / tail_count, 1), n of its tokens having delta <
    tail_below. repair_segment: tokens of a repaired segment; repair_margin: by how much its mean delta may lie below 0;
    repair_beta: beta of the pseudo-Huber penalty of what lies below; repair_coef: its coefficient. tis_cap: bound of
    the importance weight.
    """

    gate_segment: int = Field(64, ge=1)
    mild_below: float = Field(-0.5, le=0)
    mild_weight: float = Field(0.3, ge=0, le=1)
    severe_below: float = Field(-1.5, le=0)
    severe_weight: float = Field(0.1, ge=0, le=1)
    tail_below: float = Field(-6.0, le=0)
    tail_count: int = Field(2, ge=1)
    tail_drop: float = Field(0.9, ge=0, le=1)
    repair_segment: int = Field(128, ge=1)
    repair_margin: float = Field(0.03, ge=0)
    repair_beta: float = Field(5e-4**0.5, gt=0)
    repair_coef: float = Field(0.015, ge=0)
    tis_cap: float = Field(2.0, ge=1, le=1e6)

    @model_validator(mode="after")
    def _ordered(self) -> TriageConfig:
        if self.severe_below > self.mild_below:
            raise ValueError("severe_below must not lie above mild_below")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class TrainConfig(StrictModel):
    """The update.

    lr: AdamW's, constant after warmup_steps optimizer steps of linear rise. updates_per_rollout: optimizer steps per
    rollout, each over its share of the trajectories. micro_batch_size: trajectories per forward. micro_batch_tokens:
    where not 0, padded tokens per forward instead (trajectories times the longest of them); a longer trajectory goes
    alone. clip_low, clip_high: the ratio's band is [1 - clip_low, 1 + clip_high]. tis_cap: bound of the importance
    weight. old_logprob: "recompute" by the same guided forward, or "bypass": ratio and clip against the rollout's
    log-probs. max_version_diff: rows recorded under weights older than so many versions are rounded to nearest, and
    routed by the trainer. decode: slots follow from the record and the trainer's values; "forward" finds them anew in
    every forward, "once" keeps those of the old-log-prob forward for all updates of the rollout, at 4.5 bits per guided
    value of memory.
    keep_quantized_weights: fake-quantized weights stay in memory from one optimizer step to the next, as large as the
    quantized weights themselves; false quantizes them in every forward, to the same values. replay: send tokens to the
    rollout's experts (R3). guided_updates: where not 0, only the old log-probs and the first so many updates of
    a rollout are guided, later ones round to nearest. straight_through: the gradient of rounded activations, K and V:
    the identity's, or "clipped" to 0 beyond what a block's scale represents. tbpo, score_centering, triage: of the
    losses of these names, which ``method.name`` chooses.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lr: float = Field(5e-5, gt=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, ge=1e-20, le=1)
    weight_decay: float = Field(0.0, ge=0, le=10)
    grad_clip: float = Field(1.0, gt=0)
    warmup_steps: int = Field(0, ge=0)
    updates_per_rollout: int = Field(4, ge=1)
    micro_batch_size: int = Field(32, ge=1)
    micro_batch_tokens: int = Field(0, ge=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0, le=1e6)
    tis_cap: float = Field(5.0, ge=1, le=1e6)
    old_logprob: Literal["recompute", "bypass"] = "recompute"
    max_version_diff: int = Field(3, ge=0, lt=2**30)
    decode: Literal["forward", "once"] = "forward"
    gradient_checkpointing: bool = False
    keep_quantized_weights: bool = True
    advantage_eps: float = Field(1e-6, gt=0)
    replay: bool = True
    guided_updates: int = Field(0, ge=0)
    straight_through: Literal["identity", "clipped"] = "identity"
    tbpo: TBPOConfig = TBPOConfig()
    score_centering: ScoreCenteringConfig = ScoreCenteringConfig()
    triage: TriageConfig = TriageConfig()
