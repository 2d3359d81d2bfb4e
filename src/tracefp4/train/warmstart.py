"""Supervised warm start of a tiny mixture-of-experts policy: enough skill for RL, and not more.

``python -m tracefp4.train.warmstart recipes/warmstart.toml OUT_DIR`` writes a Hugging Face directory in BF16:
``model.safetensors``, ``config.json``, the tokenizer, and ``warmstart.json``, which says how it was made.

Shape letters: B problems, T tokens of a padded row, V vocabulary, E experts.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
import transformers
from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.config import StrictModel, load_config
from tracefp4.device import DeviceSetting, attention_for, resolve_device, to_device
from tracefp4.errors import TracefpError
from tracefp4.files import replaced_dir
from tracefp4.tasks import AnyTaskConfig, Prompt, Task, TaskConfig, build_text_tokenizer, build_tokenizer, make_task
from tracefp4.tasks.running_sums import WARMSTART_FIRST_STEP, RunningSumsConfig
from tracefp4.train.average import Average
from tracefp4.train.teaching import (
    EXPERTS_NAME,
    IGNORED_LABEL,
    MAX_NEW_TOKENS,
    Batches,
    Teacher,
    autocast,
    pass_rate,
    save_progress,
    supervised_batch,
)

TokenizerName = Literal["arithmetic", "text"]
"""``build_tokenizer`` or ``build_text_tokenizer``."""


class ModelConfig(StrictModel):
    """Shape of the Qwen3-MoE policy. Widths are multiples of 16: every row splits into NVFP4 blocks."""

    vocab_size: int = Field(default=32, ge=32, le=2**20, multiple_of=16)
    hidden_size: int = Field(default=128, ge=16, le=2**14, multiple_of=16)
    num_layers: int = Field(default=4, ge=1, le=256)
    num_heads: int = Field(default=4, ge=1, le=1024)
    num_kv_heads: int = Field(default=2, ge=1)
    head_dim: int = Field(default=32, ge=16, le=1024, multiple_of=16)
    num_experts: int = Field(default=8, ge=1, le=1024)
    num_experts_per_token: int = Field(default=2, ge=1)
    moe_intermediate_size: int = Field(default=64, ge=16, le=2**14, multiple_of=16)
    max_position_embeddings: int = Field(default=512, ge=64)
    initializer_range: float = Field(default=0.05, gt=0)

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} is no multiple of {self.num_kv_heads} = num_kv_heads")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(f"num_experts_per_token is above num_experts = {self.num_experts}")
        return self


class OptimizerConfig(StrictModel):
    """AdamW on FP32 parameters, linear warm-up, then a constant rate: the stop rule ends the run.

    With average > 0 what is evaluated and written is the exponential moving average of the weights: it has the accuracy
    that a falling rate would bring, at whichever step the stop rule ends the run.
    """

    batch_size: int = Field(default=32, ge=1, le=2**16)
    learning_rate: float = Field(default=2e-3, gt=0, le=1)
    weight_decay: float = Field(default=0.01, ge=0, le=10)
    beta2: float = Field(default=0.98, gt=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_steps: int = Field(default=100, ge=0)
    max_steps: int = Field(default=6000, ge=1)
    router_aux_coefficient: float = Field(default=0.03, ge=0)
    easy_share: float = Field(
        default=0.5,
        ge=0,
        lt=1,
        description="share of each batch with one-digit terms: they teach the units digit, where training on "
        "longer terms alone rests on a plateau; never evaluated on",
    )

    mistake_share: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the written solutions that hold one slip: a policy that has seen careless solutions "
        "errs at random, which RL can mend, rather than by lack of skill",
    )
    average: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="decay of the moving average of the weights, e.g. 0.995 for 200 steps; 0: the weights themselves",
    )


class StopConfig(StrictModel):
    """The band of sampled held-out pass rate (temperature 1.0) in which the warm start ends."""

    pass_rate_low: float = Field(default=0.30, ge=0, le=1)
    pass_rate_high: float = Field(default=0.45, ge=0, le=1)
    eval_every: int = Field(default=150, ge=1)
    eval_problems: int = Field(default=512, ge=1, le=4096)
    max_new_tokens: int = Field(default=MAX_NEW_TOKENS, ge=1, description="of a response, or of a turn of one")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        if self.pass_rate_low > self.pass_rate_high:
            raise ValueError("pass_rate_low is above pass_rate_high")
        return self


def check_easy(optimizer: OptimizerConfig, task: TaskConfig) -> None:
    """Raises ValueError where easy problems are asked for and the task has none."""
    if optimizer.easy_share and "max_digits" not in type(task).model_fields:
        raise ValueError(f"optimizer.easy_share must be 0: the task {task.name} has no one-digit variant")


class WarmstartConfig(StrictModel):
    """All that determines the checkpoint, up to the order of floating-point sums (threads, device, machine)."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    threads: int = Field(default=1, ge=1)
    device: DeviceSetting = "cpu"
    tokenizer: TokenizerName = "arithmetic"
    task: AnyTaskConfig = RunningSumsConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    stop: StopConfig = StopConfig()

    @model_validator(mode="after")
    def _easy_problems_exist(self) -> Self:
        check_easy(self.optimizer, self.task)
        return self


class WarmstartError(TracefpError):
    """A warm start that cannot begin or did not reach its band; the message is one sentence for the user."""


def build_config(config: WarmstartConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeConfig:
    """Of the policy, as its checkpoint will hold it."""
    shape = config.model
    return Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        # Only dense layers read it and there are none; kept consistent for tools that print it.
        intermediate_size=shape.moe_intermediate_size * shape.num_experts_per_token,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,  # type: ignore[call-arg]  # read by the model, absent from its signature
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.num_experts_per_token,
        moe_intermediate_size=shape.moe_intermediate_size,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range,
        router_aux_loss_coef=config.optimizer.router_aux_coefficient,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def build_model(config: WarmstartConfig, tokenizer: PreTrainedTokenizerBase) -> Qwen3MoeForCausalLM:
    """A freshly initialized FP32 policy with tied embeddings; draws from torch's global generator."""
    return Qwen3MoeForCausalLM(build_config(config, tokenizer)).float()


class Curriculum:
    """Mixes problems of the task with its one-digit variant; neither ever yields a held-out problem."""

    def __init__(self, task: Task, config: WarmstartConfig) -> None:
        self.n_easy = round(config.optimizer.easy_share * config.optimizer.batch_size)
        self.n_full = config.optimizer.batch_size - self.n_easy
        self.task = task
        if not self.n_easy:
            return
        self.easy_task = make_task(config.task.model_copy(update={"min_digits": 1, "max_digits": 1}))
        # The variant keeps clear of its own test pool, which differs from the task's when terms may be short.
        self.held_out = {prompt.text for prompt in task.test_prompts(min(2 * config.stop.eval_problems, 4096))}

    def prompts(self, data_step: int) -> list[Prompt]:
        """The batch of optimizer step ``data_step``, slightly short where an easy problem is held out."""
        step = WARMSTART_FIRST_STEP + data_step
        prompts = self.task.train_prompts(step, self.n_full) if self.n_full else []
        if not self.n_easy:
            return prompts
        easy = self.easy_task.train_prompts(step, self.n_easy)
        return prompts + [prompt for prompt in easy if prompt.text not in self.held_out]


@dataclass
class TrainOutcome:
    """What the training loop hands on, e.g. ``TrainOutcome(1400, 0.34, True, 402.0)``."""

    steps: int
    """optimizer steps behind the returned weights"""
    pass_rate: float
    """share of ``eval_problems`` solved at the last evaluation, FP32 weights"""
    reached_band: bool
    seconds: float
    """wall-clock seconds of training and evaluation together"""


def train(
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: WarmstartConfig,
    progress: Path | None = None,
) -> TrainOutcome:
    """Train in place until the pass rate lies in the band or ``max_steps`` have run; prints its progress.

    A jump over the band is undone: the weights of the evaluation before come back and the rate is halved, so
    the run approaches the band again in smaller steps. progress: a file, written at every evaluation, from which a
    later call goes on.
    """
    options, stop, started = config.optimizer, config.stop, time.monotonic()
    optimizer = _optimizer(model, options)
    curriculum, teacher = Curriculum(task, config), Teacher(task, options.mistake_share)
    average = Average(model, options.average)
    peak_rate, below, steps_of_below, rate = options.learning_rate, _snapshot(model), 0, 0.0
    steps = first = 0
    if progress is not None and progress.exists():
        kept = torch.load(progress, map_location=model.device, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        average.start_from(kept["average"])
        peak_rate, below, steps_of_below, rate, steps, first, spent = (kept[name] for name in _PROGRESS)
        started -= spent
    batches = Batches(lambda step: supervised_batch(teacher, curriculum.prompts(step), tokenizer), model.device.type)
    for data_step, batch in batches.of(range(first, options.max_steps)):
        for group in optimizer.param_groups:
            group["lr"] = peak_rate * min(1.0, (data_step + 1) / max(1, options.warmup_steps))
        evaluates = (data_step + 1) % stop.eval_every == 0 or data_step + 1 == options.max_steps
        loss = _update(model, optimizer, batch, options.max_grad_norm)
        average.add(model)
        steps += 1
        if not evaluates:
            continue
        rate, length = pass_rate(average.model, tokenizer, task, stop.eval_problems, config.seed, stop.max_new_tokens)
        elapsed = time.monotonic() - started
        print(
            f"step {steps:5d}  loss {float(loss):.4f}  held-out pass rate {rate:.3f} (n = {stop.eval_problems})  "
            f"{length:.0f} characters  {elapsed:.0f} s",
            flush=True,
        )
        if stop.pass_rate_low <= rate <= stop.pass_rate_high:
            model.load_state_dict(average.model.state_dict())
            return TrainOutcome(steps, rate, True, elapsed)
        if rate > stop.pass_rate_high:
            model.load_state_dict(below)
            average.start_from(below)
            steps, peak_rate = steps_of_below, peak_rate / 2
            print(f"over the band: back to step {steps} at learning rate {peak_rate:.1e}", flush=True)
        else:
            below, steps_of_below = _snapshot(average.model), steps
        if progress is not None:
            values = (peak_rate, below, steps_of_below, rate, steps, data_step + 1, elapsed)
            parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "average": average.model}
            state = {name: part.state_dict() for name, part in parts.items()}
            save_progress(progress, state | dict(zip(_PROGRESS, values, strict=True)))
    model.load_state_dict(average.model.state_dict())
    return TrainOutcome(steps, rate, False, time.monotonic() - started)


def _optimizer(model: Qwen3MoeForCausalLM, options: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(0.9, options.beta2),
        weight_decay=options.weight_decay,
        fused=True if model.device.type == "cuda" else None,
    )


_PROGRESS = ("peak_rate", "below", "steps_of_below", "rate", "steps", "data_step", "seconds")


def balance_loss(router_logits: tuple[torch.Tensor, ...], attention_mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """Load-balancing loss, 1.0 when every expert of every layer is used alike; averaged over layers.

    Transformers' own version pools the layers before it multiplies, so an expert that is dead in one layer
    may hide behind a busy one of another; here each layer answers for itself.

    Args:
        router_logits: per layer float [B*T, E], before the softmax.
        attention_mask: int64 [B, T], best on the host; padding counts nowhere.
        top_k: experts per token.
    """
    losses = []
    # Found on the host, where the mask lies: a device would have it wait for their number, at every layer.
    rows = to_device(attention_mask.flatten().nonzero()[:, 0], router_logits[0].device)
    for logits in router_logits:
        probs = logits.index_select(0, rows).float().softmax(-1)
        chosen = torch.zeros_like(probs).scatter_(1, probs.topk(top_k, dim=-1).indices, 1.0 / top_k)
        losses.append(probs.shape[-1] * (chosen.mean(0) * probs.mean(0)).sum())
    return torch.stack(losses).mean()


def _snapshot(model: Qwen3MoeForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _update(
    model: Qwen3MoeForCausalLM,
    optimizer: torch.optim.Optimizer,
    batch: dict[str, torch.Tensor],
    max_grad_norm: float,
) -> torch.Tensor:
    """One optimizer step; returns the mean cross-entropy of the response tokens, in nats, which nobody waits for."""
    model.train()
    device, real = model.device, batch["attention_mask"]
    batch = {name: to_device(tensor, device) for name, tensor in batch.items()}
    # Padding is on the right, where causal attention never looks: without a mask a GPU runs its fast kernels.
    mask = None if device.type == "cuda" else batch["attention_mask"]
    with autocast(device), attention_for(device, 0):
        # The decoder and the head by themselves: the whole model would add up a balancing loss of its own.
        out = model.model(batch["input_ids"], attention_mask=mask, output_router_logits=True, use_cache=False)
        logits = model.lm_head(out.last_hidden_state)[:, :-1]
    loss = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED_LABEL
    )
    balance = balance_loss(out.router_logits, real, model.config.num_experts_per_tok)
    optimizer.zero_grad(set_to_none=True)
    (loss + model.config.router_aux_loss_coef * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    return loss.detach()


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def run_warmstart(
    config: WarmstartConfig, out_dir: Path, require_band: bool = True, resumable: bool = False
) -> dict[str, Any]:
    """Train and write the checkpoint directory; returns what ``warmstart.json`` holds.

    resumable: keep the progress in a file beside ``out_dir`` until that is complete, and go on from such a file.
    The checkpoint is written beside ``out_dir`` and renamed into place, so ``out_dir`` is complete or absent.

    Raises:
        TracefpError: the task writes no solutions, or the device is not there.
        WarmstartError: ``out_dir`` is not an empty or absent directory, or ``require_band`` and the pass rate
            never fell in the band within ``max_steps``.
        ValueError: the task's name or its ranges are unusable.
    """
    if os.path.lexists(out_dir) and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise WarmstartError(f"{out_dir} exists and is not an empty directory: choose another or remove it")
    try:
        # Minutes of training follow: a folder that cannot be written must show now.
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out_dir.parent):
            pass
    except OSError as error:
        raise WarmstartError(f"{out_dir.parent} cannot be written ({error.strerror}): choose another folder") from error
    if config.threads > (os.cpu_count() or 1):
        raise WarmstartError(f"threads {config.threads} exceeds this machine's {os.cpu_count()} cores")
    task = make_task(config.task)
    device = resolve_device(config.device, "device")
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer() if config.tokenizer == "arithmetic" else build_text_tokenizer()
    if len(tokenizer) > config.model.vocab_size:
        raise WarmstartError(f"model.vocab_size {config.model.vocab_size} is below the tokenizer's {len(tokenizer)}")
    model = build_model(config, tokenizer)
    module: torch.nn.Module = model
    module.to(device)
    if device == "cuda":
        model.set_experts_implementation(EXPERTS_NAME)
    progress = out_dir.with_name(f".{out_dir.name}.progress") if resumable else None
    try:
        outcome = train(model, tokenizer, task, config, progress)
    except OSError as error:
        raise WarmstartError(f"{progress} cannot be written ({error.strerror})") from error
    if require_band and not outcome.reached_band:
        raise WarmstartError(
            f"pass rate {outcome.pass_rate:.3f} after {outcome.steps} steps is outside "
            f"[{config.stop.pass_rate_low}, {config.stop.pass_rate_high}]; "
            "raise optimizer.max_steps or ease the task"
        )
    with replaced_dir(out_dir) as staging:
        record = _write_checkpoint(staging, model, tokenizer, task, config, outcome)
        for path in staging.iterdir():
            path.chmod(0o644)  # safetensors makes its own private to the user
    if progress is not None:
        progress.unlink(missing_ok=True)
    return record


def _write_checkpoint(
    directory: Path,
    model: Qwen3MoeForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    config: WarmstartConfig,
    outcome: TrainOutcome,
) -> dict[str, Any]:
    """Save in BF16 and measure the pass rate of those very weights on twice the problems, with a new seed."""
    model.bfloat16()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _use_portable_tokenizer_class(directory / "tokenizer_config.json")
    n = min(2 * config.stop.eval_problems, 4096)
    rate, length = pass_rate(model, tokenizer, task, n, config.seed + 1, config.stop.max_new_tokens)
    dtype = "float32" if model.device.type == "cpu" else "float32, multiplied in bfloat16"
    record = {
        "recipe": config.model_dump(),
        "steps": outcome.steps,
        "reached_band": outcome.reached_band,
        "seconds": round(outcome.seconds, 1),
        "pass_rate_at_stop": {"value": outcome.pass_rate, "n": config.stop.eval_problems, "dtype": dtype},
        "pass_rate": {"value": rate, "n": n, "dtype": "bfloat16", "temperature": 1.0},
        "mean_response_characters": round(length, 2),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "reasoning-gym": _version("reasoning-gym"),
        },
        "sha256": {"model.safetensors": sha256_of(directory / "model.safetensors")},
    }
    (directory / "warmstart.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return record


def _use_portable_tokenizer_class(path: Path) -> None:
    # Transformers 5 writes its internal class name, which inference engines built on version 4 do not know.
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _version(distribution: str) -> str | None:
    """None where the package is on the path without its metadata."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def main(arguments: list[str] | None = None) -> int:
    """Command line: RECIPE OUT_DIR [--resume]; 0 on success, 2 after printing one sentence to standard error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    resumable = "--resume" in arguments[2:]
    if len(arguments) != 2 + resumable:
        print("usage: python -m tracefp4.train.warmstart RECIPE.toml OUT_DIR [--resume]", file=sys.stderr)
        return 2
    transformers.utils.logging.disable_progress_bar()
    try:
        config = load_config(arguments[0], [], WarmstartConfig)
        record = run_warmstart(config, Path(arguments[1]), resumable=resumable)
    except TracefpError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rate = record["pass_rate"]
    print(f"wrote {arguments[1]}: pass rate {rate['value']:.3f} (n = {rate['n']}), {record['steps']} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
