"""A recipe: one section a component, each beside its class; those of the loop itself are here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tracefp4.align.watchdog import WatchConfig
from tracefp4.config import StrictModel
from tracefp4.device import DeviceSetting
from tracefp4.guidance.config import GuidanceStoreConfig
from tracefp4.methods import MethodConfig, QuantConfig, get_method
from tracefp4.rollout.config import RolloutConfig
from tracefp4.tasks import AnyTaskConfig
from tracefp4.tasks.running_sums import RunningSumsConfig
from tracefp4.train.config import TrainConfig


class ModelConfig(StrictModel):
    """path: a local Hugging Face checkpoint directory, or "builtin:NAME" of one that ships with the package."""

    path: str = "builtin:sums-moe"


class SamplingConfig(StrictModel):
    """prompts_per_step groups of samples_per_prompt responses each; max_new_tokens and temperature of each.
    max_prompt_tokens: longest prompt, 0 for rollout.max_model_len - max_new_tokens; overlong_prompts: what becomes of
    longer ones; "truncate" keeps the last tokens of plain text. chat_template: use the tokenizer's where it has one
    ("auto"), require it, or take the plain text."""

    prompts_per_step: int = Field(16, ge=1)
    samples_per_prompt: int = Field(8, ge=2)
    max_new_tokens: int = Field(96, ge=1)
    temperature: float = Field(1.0, ge=0.01, le=100)
    max_prompt_tokens: int = Field(0, ge=0)
    overlong_prompts: Literal["drop", "truncate", "error"] = "drop"
    chat_template: Literal["auto", "on", "off"] = "auto"


class LoopConfig(StrictModel):
    """steps: RL steps. device: of rollout and trainer; "auto" takes a GPU where torch sees one. seed: of everything
    random. eval_prompts: held-out problems, 0 to skip; evaluated before the
    first and after the last step, and every eval_every steps where that is not 0. probe_trajectories: responses per
    probed step whose full codes are kept for the mismatch metrics; probe_every: probe every n-th step, 0 never.
    threads: of torch, 0 leaves its choice. save_every: write the policy to checkpoint/ every n-th step as well as at
    the end, each time in place of the last. state_every: write what a resumed run needs every n-th step, 0 never;
    keep_states: how many of them stay. keep_best: 1 keeps the policy of the best held-out pass rate in
    checkpoint-best/, by the evaluations of eval_every and the last one. sample_responses: responses, spread over the
    groups, that are written to samples.jsonl every sample_every-th step; 0 of either writes none.

    asynchronous: rollout and trainer run at the same time, as processes of their own. max_lag: most policy versions
    that a token may lag behind the trainer that learns from it; 0 is on-policy. on_stale: "wait" for responses that
    would grow too old, so that none is lost, or take what is there and "drop" them. hang_seconds: replace a process of
    an asynchronous run that others wait for and that shows no progress for so long; start_seconds: the same until its
    first work is done; 0 never. max_restarts: most replacements in a row without a new step.

    lag: without asynchronous, every rollout runs under the weights of so many steps ago (the first ones under the
    start's): staleness that two runs share exactly."""

    steps: int = Field(60, ge=1)
    device: DeviceSetting = "auto"
    seed: int = Field(0, ge=0, lt=2**30)
    eval_prompts: int = Field(0, ge=0)
    eval_every: int = Field(0, ge=0)
    probe_trajectories: int = Field(8, ge=0)
    probe_every: int = Field(1, ge=0)
    threads: int = Field(0, ge=0)
    tensorboard: bool = True
    save_every: int = Field(0, ge=0)
    state_every: int = Field(10, ge=0)
    keep_states: int = Field(2, ge=1)
    keep_best: int = Field(0, ge=0, le=1)
    sample_every: int = Field(10, ge=0)
    sample_responses: int = Field(4, ge=0)
    asynchronous: bool = False
    max_lag: int = Field(3, ge=0)
    on_stale: Literal["wait", "drop"] = "wait"
    hang_seconds: float = Field(1200.0, ge=0)
    start_seconds: float = Field(1800.0, ge=0)
    max_restarts: int = Field(3, ge=0)
    lag: int = Field(0, ge=0, le=64)

    @model_validator(mode="after")
    def _one_kind_of_staleness(self) -> LoopConfig:
        if self.lag and self.asynchronous:
            raise ValueError("run.lag is for synchronous runs: set run.max_lag instead, or run.asynchronous=false")
        return self

    @model_validator(mode="after")
    def _evaluations_are_there(self) -> LoopConfig:
        if self.eval_every and not self.eval_prompts:
            raise ValueError("run.eval_every evaluates nothing while run.eval_prompts is 0: set it, e.g. to 128")
        if self.keep_best and not self.eval_every:
            raise ValueError("run.keep_best compares evaluations: set run.eval_every and run.eval_prompts too")
        return self


class RunConfig(StrictModel):
    """A recipe."""

    model: ModelConfig = ModelConfig()
    task: AnyTaskConfig = RunningSumsConfig()
    method: MethodConfig = MethodConfig()
    quant: QuantConfig = QuantConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    guidance: GuidanceStoreConfig = GuidanceStoreConfig()
    train: TrainConfig = TrainConfig()
    run: LoopConfig = LoopConfig()
    watch: WatchConfig = WatchConfig()

    @model_validator(mode="after")
    def _known_method(self) -> RunConfig:
        method = get_method(self.method.name)
        if self.run.asynchronous and method.deployed is not None:
            raise ValueError(
                f"{method.name} evaluates in another form than its rollout, which an asynchronous run does not: train "
                f"bf16 and evaluate it with --forms bf16,{method.name}, or set run.asynchronous=false"
            )
        if method.guidance is not None and self.run.lag > self.train.max_version_diff:
            raise ValueError(
                f"run.lag {self.run.lag} exceeds train.max_version_diff {self.train.max_version_diff}: every record "
                "would be too old; raise it too"
            )
        if self.rollout.dtype != self.train.dtype:
            raise ValueError(
                f"rollout.dtype {self.rollout.dtype} and train.dtype {self.train.dtype} differ: the two paths would "
                "quantize different weights"
            )
        return self
