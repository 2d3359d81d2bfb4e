"""The RL step: guided forward for old log-probs, then several clipped updates (GRPO, TIS, R3)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tracefp4.align.metrics import importance_metrics, mismatch_metrics
from tracefp4.device import attention_for
from tracefp4.guidance.store import GuidanceStore
from tracefp4.nn import MicroBatch, SiteObserver, TrainerForward, prepare_model
from tracefp4.nn.attention import CAUSAL_NAME
from tracefp4.recipe import QuantRecipe
from tracefp4.train.advantage import assign_advantages
from tracefp4.train.config import TrainConfig
from tracefp4.train.losses import (
    LossTerms,
    TokenBatch,
    make_loss,
)
from tracefp4.train.optimizer import MasterOptimizer
from tracefp4.train.slices import MicroBatchBuilder, RowCounts, padding_metrics, split_micro_batches
from tracefp4.types import RolloutBatch, TrainBatch, Trajectory


@dataclass
class _Micro:
    """A micro-batch with everything its forwards need. observer: watches the one that gives the old log-probs."""

    batch: TrainBatch
    guidance: MicroBatch
    observer: SiteObserver
    old_logprobs: Tensor | None = None


class GRPOTrainer:
    """Trains a transformers model by the guided forward.

    model: Qwen3-MoE or Qwen3; cast to ``config.dtype``. recipe: the rollout's numeric contract. forward: how much of
    it this forward mirrors. store: where guidance is read. temperature: the rollout's, log-probs are taken under the
    same. loss: one of ``tracefp4.train.losses.LOSSES``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: QuantRecipe,
        forward: TrainerForward,
        config: TrainConfig,
        store: GuidanceStore,
        temperature: float = 1.0,
        pad_id: int = 0,
        seed: int = 0,
        device: str = "cpu",
        loss: str = "grpo",
    ) -> None:
        module: nn.Module = model
        self.loss = make_loss(loss, config)
        clipped = config.straight_through == "clipped"
        forward = replace(forward, replay=forward.replay and config.replay, clipped=clipped)
        module.to(device=device).train()
        cast_weights(module, getattr(torch, config.dtype))
        self.model = model
        self.recipe, self.config, self.device = recipe, config, device
        self.temperature, self.pad_id = temperature, pad_id
        self.context = prepare_model(self.model, recipe, forward, keep_weights=config.keep_quantized_weights)
        if torch.device(device).type == "cuda":  # no mask is passed there, see `_logprobs`
            self.model.set_attn_implementation(CAUSAL_NAME)
        if config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = MasterOptimizer(
            self.model, config.lr, config.betas, config.eps, config.weight_decay, config.grad_clip
        )
        c = self.model.config
        kv_width = c.num_key_value_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
        layers = self.model.get_decoder().layers
        self.builder = MicroBatchBuilder(
            store,
            recipe,
            forward.guided,
            {"expert_input": c.hidden_size, "key": kv_width, "value": kv_width},
            [i for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")],
            getattr(c, "num_experts_per_tok", 0),
            config.max_version_diff,
        )
        self.generator = torch.Generator().manual_seed(seed)
        self._version = 0
        self._optimizer_steps = 0

    @property
    def version(self) -> int:
        """Policy version: rises by one with every ``update``."""
        return self._version

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights in the compute dtype under transformers names; a tied head appears once, as the embedding."""
        for name, p in self.model.named_parameters():
            yield name, p.detach()

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """(tensors, counters): all that the next update depends on."""
        tensors = self.optimizer.state_tensors(self.model)
        tensors["generator"] = self.generator.get_state()
        return tensors, {"version": self._version, "optimizer_steps": self._optimizer_steps}

    def load_state(self, tensors: dict[str, Tensor], counters: dict[str, int]) -> None:
        """Inverse of ``state``. Raises KeyError for a tensor or counter that is missing."""
        self.optimizer.load_state_tensors(self.model, tensors)
        self.generator.set_state(tensors["generator"])
        self._version, self._optimizer_steps = counters["version"], counters["optimizer_steps"]

    def update(self, batch: RolloutBatch) -> dict[str, float]:
        """One RL step; returns its metrics: those of ``align.metrics``, ``nn.observe`` and ``RowCounts``, and train/*.

        The distance of the two paths is measured on all trajectories, not only on those that teach: which groups
        have an advantage depends on the mode. Raises ValueError for an empty batch.
        """
        answered = [t for t in batch.trajectories if t.num_sampled]
        if not answered:
            raise ValueError("the rollout batch holds no trajectory with a response")
        kept = assign_advantages(answered, self.config.advantage_eps)
        metrics = {"train/no_advantage_share": 1 - len(kept) / len(answered)}
        counts, observer = RowCounts(), SiteObserver()
        teaching = {id(t) for t in kept}
        mini_batches = self._plan(kept, counts, observer)
        others = self._micro_batches([t for t in answered if id(t) not in teaching], counts, observer)
        micros = [m for mini in [*mini_batches, others] for m in mini]
        metrics |= padding_metrics([m.batch for m in micros])
        # Of the first mini-batch the training forward itself gives them: the weights are still those of the rollout.
        self._old_logprobs([m for mini in [*mini_batches[1:], others] for m in mini])
        sums: dict[str, list[float]] = defaultdict(list)
        own: dict[str, list[float]] = {}
        for index, mini in enumerate(mini_batches):
            if self.config.guided_updates and index >= self.config.guided_updates:
                for m in mini:
                    m.guidance = replace(m.guidance, guidance={})
            for name, value in self._optimizer_step(mini, own).items():
                sums[name].append(value)
        metrics |= self._mismatch(micros) | observer.metrics() | counts.replay_metrics()
        if self.builder.guided:
            metrics |= counts.metrics()
        metrics |= {name: sum(v) / len(v) for name, v in sums.items()}
        metrics |= {name: value / weight for name, (value, weight) in own.items() if weight}
        self._version += 1
        return metrics

    def logprobs(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Log-probs of the trajectories' next tokens under the weights as they are, by the forward that is trained.

        f32 [B, T - 1] of every micro-batch, shortest trajectories first. Trains nothing, and counts nothing.
        """
        micros = self._micro_batches(list(trajectories), RowCounts(), SiteObserver())
        self._old_logprobs(micros)
        return [m.old_logprobs for m in micros if m.old_logprobs is not None]

    # -- parts of an update -----------------------------------------------------------------------------------

    def _plan(self, kept: list[Trajectory], counts: RowCounts, observer: SiteObserver) -> list[list[_Micro]]:
        """Shuffles trajectories into mini-batches."""
        order = torch.randperm(len(kept), generator=self.generator).tolist()
        minis = min(self.config.updates_per_rollout, len(kept))
        return [self._micro_batches([kept[i] for i in order[u::minis]], counts, observer) for u in range(minis)]

    def _micro_batches(self, trajectories: list[Trajectory], counts: RowCounts, observer: SiteObserver) -> list[_Micro]:
        c, micros = self.config, []
        for group in split_micro_batches(trajectories, c.micro_batch_size, c.micro_batch_tokens):
            batch = TrainBatch.collate(group, self.pad_id, self.device)
            guidance = self.builder.build(batch, self._version, counts)
            guidance.decoded = {} if c.decode == "once" else None
            micros.append(_Micro(batch, guidance, observer))
        return micros

    def _old_logprobs(self, micros: list[_Micro]) -> None:
        """Log-probs under the weights that the rollout had, by the same guided forward that is trained."""
        for m in micros:
            with torch.no_grad(), self.context.armed(m.guidance, m.observer) as kwargs, _attention(m.batch):
                m.old_logprobs, _, _ = self._logprobs(m.batch, kwargs, learning=False)

    def _mismatch(self, micros: list[_Micro]) -> dict[str, float]:
        """How far the old log-probs are from those of the rollout."""
        old, rollout, fresh = [], [], []
        for m in micros:
            assert m.old_logprobs is not None
            old.append(_responses(m, m.old_logprobs))
            rollout.append(_responses(m, m.batch.rollout_logprobs))
            trajectories = m.batch.trajectories
            # All rows, not the token's own version: a later token reads the K and V of every earlier row.
            rows = torch.cat([t.row_versions for t in trajectories]) == self._version
            parts = rows.split([t.num_rows for t in trajectories])
            everywhere = bool(rows.all())
            for t, own in zip(trajectories, parts, strict=True):
                fresh += [everywhere or bool(own.all())] * t.num_sampled
        old_all, rollout_all = torch.cat(old), torch.cat(rollout)
        lengths = [t.num_sampled for m in micros for t in m.batch.trajectories]
        metrics = mismatch_metrics(old_all, rollout_all, lengths)
        metrics |= importance_metrics(old_all - rollout_all, self.loss.tis_cap)
        if not all(fresh):  # else the two say the same
            fresh_all = torch.tensor(fresh, device=old_all.device)
            metrics["mismatch/fresh_share"] = sum(fresh) / len(fresh)
            if any(fresh):
                only = mismatch_metrics(old_all[fresh_all], rollout_all[fresh_all])
                metrics["mismatch/fresh_logprob_abs_diff_mean"] = only["mismatch/logprob_abs_diff_mean"]
                metrics["mismatch/fresh_kl_k3"] = only["mismatch/kl_k3"]
        return metrics

    def _optimizer_step(self, mini: list[_Micro], own: dict[str, list[float]]) -> dict[str, float]:
        """One step of the optimizer; own: [sum, weight] of the loss's own metrics, added to."""
        c = self.config
        tokens = sum(t.num_sampled for m in mini for t in m.batch.trajectories)
        responses = sum(t.num_sampled > 0 for m in mini for t in m.batch.trajectories)
        units = tokens if self.loss.per == "token" else responses
        stats: dict[str, float] = defaultdict(float)
        sums: list[Tensor] = []
        names: list[str] = []
        for m in mini:
            # Backward inside: under gradient checkpointing it repeats the forward and needs the same rows.
            observer = m.observer if m.old_logprobs is None else None
            with self.context.armed(m.guidance, observer) as kwargs, _attention(m.batch):
                logprobs, entropy, head = self._logprobs(m.batch, kwargs)
                self.context.observer = None  # what is forwarded again going back was seen
                if m.old_logprobs is None:
                    m.old_logprobs = logprobs.detach()
                terms = self._loss(m, logprobs, head)
                (terms.loss / units).backward()
            self.optimizer.accumulate()
            assert entropy is not None
            sampled = (_responses(m, entropy).sum(), terms.clipped.sum(), _responses(m, terms.ratio).sum())
            parts = (terms.loss.detach(), *sampled)
            names = list(terms.sums)
            sums.append(torch.stack([part.double() for pair in (parts, *terms.sums.values()) for part in pair]))
        # Read once: each number asked for on the way would have the host wait for the device.
        for row in torch.stack(sums).tolist():
            for name, value in zip(("loss", "entropy", "clip_frac", "ratio_mean"), row, strict=False):
                stats[f"train/{name}"] += value / (units if name == "loss" else tokens)
            for i, name in enumerate(names):
                own[name] = [a + b for a, b in zip(own.get(name, [0.0, 0.0]), row[4 + 2 * i : 6 + 2 * i], strict=True)]
        if not math.isfinite(stats["train/loss"]):  # its gradients may be finite all the same
            self.optimizer.drop()
            raise FloatingPointError(f"the policy loss is {stats['train/loss']}; the update was not applied")
        rise = min(1.0, (self._optimizer_steps + 1) / c.warmup_steps) if c.warmup_steps else 1.0
        stats["train/grad_norm"] = self.optimizer.step(c.lr * rise)
        self._optimizer_steps += 1
        return stats

    def _loss(self, m: _Micro, logprobs: Tensor, head: Tensor | None = None) -> LossTerms:
        b = m.batch
        assert m.old_logprobs is not None
        return self.loss(
            TokenBatch(
                logprobs,
                m.old_logprobs,
                b.rollout_logprobs,
                b.advantages,
                b.response_mask,
                head,
                b.head_logprobs,
            )
        )

    def _logprobs(
        self, batch: TrainBatch, kwargs: dict[str, int], learning: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probs of the next tokens, f32 [B, T - 1]; learning: and their entropy in nats without gradient, and the
        log-probs of the rollout's likeliest tokens, [B, T - 1, k], where the loss takes them."""
        # Padding is on the right, where causal attention never looks: without a mask a GPU runs its fast kernels, and
        # the rows of padding hold numbers that nobody reads.
        mask = None if batch.input_ids.is_cuda else batch.attention_mask
        logits = self.model(input_ids=batch.input_ids, attention_mask=mask, use_cache=False, **kwargs).logits[:, :-1]
        logits = logits.float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        logp = torch.log_softmax(logits, dim=-1)
        own = logp.gather(-1, batch.input_ids[:, 1:, None])[..., 0]
        if not learning:
            return own, None, None
        with torch.no_grad():
            entropy = -(logp.exp() * logp).sum(-1)
        head = None
        if self.loss.top_logprobs and batch.head_ids is not None:
            head = logp.gather(-1, batch.head_ids)
        return own, entropy, head


def _responses(m: _Micro, x_BT: Tensor) -> Tensor:
    """[n]: the values at sampled response tokens; a mask would have the host wait for their number."""
    return x_BT.reshape(-1).index_select(0, m.batch.response_at)


def _attention(batch: TrainBatch) -> AbstractContextManager[None]:
    ids = batch.input_ids
    return attention_for(ids.device, ids.numel() * ids.shape[1])


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the parameters only: ``model.to(dtype)`` would round the rotary frequencies too, which are FP32 buffers."""
    for p in model.parameters():
        p.data = p.data.to(dtype)
