"""What a run is made of before its weights are read, and how prompts become requests and responses rewards."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tracefp4.assets import builtin_model_path
from tracefp4.device import machine_memory, resolve_device
from tracefp4.errors import TracefpError
from tracefp4.guidance.plan import record_row_bytes
from tracefp4.guidance.schema import full_bits
from tracefp4.guidance.store import GuidanceStore
from tracefp4.loop.config import RunConfig
from tracefp4.methods import Method, get_method
from tracefp4.nn.loading import (
    check_weights,
    checkpoint_directory,
    count_weights,
    load_policy,
    read_config,
    read_tokenizer,
)
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.config import RolloutConfig, check_device
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import ModelShape
from tracefp4.saves import SaveSizes
from tracefp4.tasks import Exchanges, Prompt, PromptEncoder, Task, ToolTask, make_task, score_all
from tracefp4.train.losses import make_loss
from tracefp4.train.trainer import GRPOTrainer, TrainConfig
from tracefp4.types import Request, SamplingParams, Trajectory

RESPONSE_BYTES = 4 << 10
"""Least memory of a request, its sequence and its trajectory, however short."""


def model_path(path: str) -> Path:
    """Directory of a local or built-in checkpoint. Raises TracefpError where it is none."""
    if path.startswith("builtin:"):
        return builtin_model_path(path.removeprefix("builtin:"))
    return checkpoint_directory(path)


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on all parts; equal parts give equal seeds on every machine."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@dataclass(frozen=True)
class Parts:
    """The parts of a run; engine and trainer, which hold weights, are made from it."""

    config: RunConfig
    path: Path
    method: Method
    rollout: RolloutConfig
    train: TrainConfig
    tokenizer: Any
    encoder: PromptEncoder
    task: Task
    hf_config: Any
    recipe: QuantRecipe
    sizes: SaveSizes
    device: str = "cpu"

    def make_engine(self, store: GuidanceStore, recipe: QuantRecipe | None = None) -> RolloutEngine:
        """An engine without weights. recipe: another numeric form than the run's."""
        return RolloutEngine(self.hf_config, recipe or self.recipe, self.rollout, store, self.device)

    def make_trainer(self, store: GuidanceStore) -> GRPOTrainer:
        """The trainer with the checkpoint's weights."""
        return GRPOTrainer(
            load_policy(self.path, self.train.dtype),
            self.recipe,
            self.method.forward,
            self.train,
            store,
            temperature=self.config.sampling.temperature,
            pad_id=self.tokenizer.pad_token_id,
            seed=derive_seed(self.config.run.seed, "minibatches"),
            device=self.device,
            loss=self.method.loss,
        )

    @property
    def evaluated_recipe(self) -> QuantRecipe:
        """The form in which held-out problems are answered; nothing is recorded."""
        recipe = self.method.deployed_recipe(self.config.quant, self.hf_config.num_hidden_layers)
        return replace(recipe, guided_layers=())

    def guidance_bytes(self) -> int:
        """Most bytes of records that lie between rollout and trainer at once; 0 where they stay in memory.

        Every response as long as it may be. A shard goes when all of its records are used, so that twice the records
        may be there where groups end out of order; ``guidance.keep_gb`` bounds them.
        """
        c, s = self.config, self.config.sampling
        if c.guidance.url == "memory" and not c.run.asynchronous:
            return 0
        shape = ModelShape.from_hf(self.hf_config)
        kv_width = shape.kv_heads * shape.head_dim
        widths = {"expert_input": shape.hidden, "key": kv_width, "value": kv_width}
        guided, formats = self.recipe.guided_layers, (self.recipe.activations, self.recipe.kv)
        row = record_row_bytes(self.recipe, widths, len(guided), self.recipe.bits) if guided else 0
        full = [full_bits(name) for name in formats if name]
        probe = record_row_bytes(self.recipe, widths, shape.layers, max(full)) if full else 0
        steps = 2 * (c.run.max_lag + 1) if c.run.asynchronous else 1
        responses = steps * s.prompts_per_step * s.samples_per_prompt + c.run.eval_prompts
        rows = self.encoder.max_prompt_tokens + s.max_new_tokens
        need = rows * (responses * row + steps * (c.run.probe_trajectories if c.run.probe_every else 0) * probe)
        return min(need, int(c.guidance.keep_gb * 2**30)) if c.guidance.keep_gb else need

    def close(self) -> None:
        """Ends what the task keeps running, such as the workers of a check."""
        close = getattr(self.task, "close", None)
        if close is not None:
            close()

    # -- prompts ------------------------------------------------------------------------------------------------

    def encode(self, prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[tuple[int, ...]]]:
        """The prompts that fit and their token ids, in order. Raises TracefpError where none fits."""
        kept = [(p, ids) for p in prompts if (ids := self.encoder.encode(p)) is not None]
        if not kept:
            raise TracefpError(
                f"every prompt exceeds {self.encoder.max_prompt_tokens} tokens (the shortest has "
                f"{self.encoder.shortest_dropped}): raise rollout.max_model_len, and sampling.max_prompt_tokens where "
                "it is set"
            )
        return [p for p, _ in kept], [ids for _, ids in kept]

    def requests(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        tag: str,
        probes: int = 0,
        encoded: Sequence[tuple[int, ...]] | None = None,
        heads: bool = False,
    ) -> list[Request]:
        """``samples`` requests a prompt, prompt by prompt. probes of them, spread evenly, keep their full codes.

        encoded: the prompts' token ids as ``encode`` gave them; left out, every prompt must fit. heads: for training:
        the rollout's likeliest tokens are kept where the method's loss takes them.
        """
        if encoded is None:
            kept, encoded = self.encode(prompts)
            if len(kept) != len(prompts):
                raise TracefpError(
                    f"{len(prompts) - len(kept)} of {len(prompts)} prompts do not fit; encode them first"
                )
        s, seed = self.config.sampling, self.config.run.seed
        wanted = make_loss(self.method.loss, self.train).top_logprobs if heads else 0
        head = min(wanted, self.hf_config.vocab_size)
        total = len(prompts) * samples
        stride = total / probes if probes else 0
        probed = {int(i * stride) for i in range(min(probes, total))}
        out: list[Request] = []
        for p, ids in zip(prompts, encoded, strict=True):
            for j in range(samples):
                sampling = SamplingParams(
                    temperature=s.temperature,
                    max_new_tokens=s.max_new_tokens,
                    stop_token_ids=(self.tokenizer.eos_token_id,),
                    seed=derive_seed(seed, tag, p.id, j),
                    top_logprobs=head,
                )
                out.append(Request(f"{tag}/{p.id}/{j}", ids, sampling, probe=len(out) in probed))
        return out

    # -- responses ----------------------------------------------------------------------------------------------

    def exchanges(self, prompts: Mapping[str, Prompt]) -> Exchanges | None:
        """What answers the turns of these requests; None for a task of one turn. prompts: by request id."""
        if not isinstance(self.task, ToolTask):
            return None
        return Exchanges(self.task, self.encoder, self.tokenizer, prompts)

    def text(self, trajectory: Trajectory) -> str:
        """The response as text, the environment's answers included."""
        return str(self.tokenizer.decode(list(trajectory.response_ids), skip_special_tokens=True))

    def score(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], exchanges: Exchanges | None = None
    ) -> list[float]:
        """Rewards, one a trajectory, in order; of several turns the last one is scored.

        A response that was cut off has not said that it is finished, whatever it has written so far: reward 0.
        """
        ended = [i for i, t in enumerate(trajectories) if t.finish_reason == "stop"]
        texts = [
            self.text(trajectories[i]) if exchanges is None else exchanges.last_turn(trajectories[i].request_id)
            for i in ended
        ]
        rewards = [0.0] * len(trajectories)
        for i, reward in zip(ended, score_all(self.task, [prompts[i] for i in ended], texts), strict=True):
            rewards[i] = reward
        return rewards


def preflight(config: RunConfig, task: Task | None = None, training: bool = True) -> Parts:
    """Makes all that is cheap and checks the rest, without reading the weights.

    task: one of your own, in place of the one that ``config.task`` names. training: check the problems too that a run
    trains and is evaluated on. Raises TracefpError for whatever would stop
    this run at its start.
    """
    if config.run.threads > (os.cpu_count() or 1):
        raise TracefpError(f"run.threads {config.run.threads} exceeds this machine's {os.cpu_count()} cores")
    device = resolve_device(config.run.device)
    check_device(config.rollout, device)  # before what the kernels do not take: they are not there
    rollout, train = config.rollout, config.train
    path = model_path(config.model.path)
    method = get_method(config.method.name).configured(config.method)
    if method.dtype is not None:
        rollout = rollout.model_copy(update={"dtype": method.dtype})
        train = train.model_copy(update={"dtype": method.dtype})
    hf_config = read_config(path)
    tokenizer = read_tokenizer(path, hf_config)
    if task is None:
        # Another seed is another run: other problems too, not only other samples of the same ones.
        task = make_task(config.task.model_copy(update={"seed": config.task.seed + config.run.seed}))
    ModelShape.from_hf(hf_config)
    recipe = method.recipe(config.quant, hf_config.num_hidden_layers)
    encoder = make_encoder(tokenizer, config)
    check_weights(path, hf_config)
    weights, itemsize = count_weights(path), getattr(torch, train.dtype).itemsize
    sizes = SaveSizes.of(weights, itemsize)
    sizes = replace(sizes, state=sizes.state + config.run.lag * itemsize * weights)  # past weights are in it too
    parts = Parts(config, path, method, rollout, train, tokenizer, encoder, task, hf_config, recipe, sizes, device)
    if training:
        _check_prompts(parts)
    return parts


def make_encoder(tokenizer: Any, config: RunConfig) -> PromptEncoder:
    """The encoder of a run's prompts. Raises TracefpError where they and a response exceed rollout.max_model_len."""
    s, limit = config.sampling, config.rollout.max_model_len
    room = limit - s.max_new_tokens
    if room < max(1, s.max_prompt_tokens):
        what = f"sampling.max_new_tokens {s.max_new_tokens} leaves no room for a prompt in"
        if s.max_prompt_tokens:
            what = (
                f"sampling.max_prompt_tokens {s.max_prompt_tokens} + sampling.max_new_tokens {s.max_new_tokens} exceed"
            )
        raise TracefpError(f"{what} rollout.max_model_len {limit}: raise it, or allow fewer tokens")
    return PromptEncoder(tokenizer, s.max_prompt_tokens or room, s.overlong_prompts, s.chat_template)


def _check_prompts(parts: Parts) -> None:
    """Whether the task has the problems that the run asks for, and tokenizer and engine take them."""
    config, task = parts.config, parts.task
    _check_batch(config)
    prompts = _supply("sampling.prompts_per_step", config.sampling.prompts_per_step, lambda n: task.train_prompts(0, n))
    if config.run.eval_prompts:
        prompts = prompts + _supply("run.eval_prompts", config.run.eval_prompts, task.test_prompts)
    _, encoded = parts.encode(prompts)
    # On the meta device nothing is allocated; a cache that is too small for one sequence shows all the same.
    engine = RolloutEngine(parts.hf_config, parts.recipe, parts.rollout, device="meta")
    sampling = SamplingParams(max_new_tokens=config.sampling.max_new_tokens)
    engine.add_request(Request("with the longest prompt", max(encoded, key=len), sampling))


def _check_batch(config: RunConfig) -> None:
    """Refuses a step whose responses alone, without their records, exceed the machine's memory."""
    s = config.sampling
    need = s.prompts_per_step * s.samples_per_prompt * RESPONSE_BYTES
    have = machine_memory()
    if need > have:
        raise TracefpError(
            f"{s.prompts_per_step} x {s.samples_per_prompt} responses a step take at least {need / 2**30:.0f} GiB of "
            f"this machine's {have / 2**30:.0f} GiB: lower sampling.prompts_per_step or sampling.samples_per_prompt"
        )


def _supply(key: str, n: int, supply: Any) -> list[Prompt]:
    """n problems. Raises TracefpError, naming the setting, where the task has fewer."""
    try:
        got: list[Prompt] = supply(n)
    except TracefpError as error:
        raise TracefpError(f"{key} = {n} cannot be met: {error}") from error
    if len(got) != n:
        raise TracefpError(f"{key} = {n} cannot be met: the task gives {len(got)} problems")
    return got
