"""verl's FSDP2 engine with the guided forward. Without settings of ours it is verl's own, unchanged."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from verl.utils.metric import AggregationType, Metric
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from tracefp4.adapters.verl import checkpoint, losses
from tracefp4.adapters.verl.figures import SUM, WEIGHT
from tracefp4.adapters.verl.guided import GuidedForward, Row, keep_own_dtypes
from tracefp4.adapters.verl.probes import over_ranks
from tracefp4.adapters.verl.rows import note_of
from tracefp4.adapters.verl.settings import AdapterSettings, read_settings
from tracefp4.errors import TracefpError
from tracefp4.nn import SiteObserver
from tracefp4.train.slices import RowCounts

recipe_hash: str | None = None
"""Of the model that this process trains; None where it trains none."""
published_version: int | None = None
"""Policy version of the weights that this process last gave to its rollout."""


class TracefpFSDPEngine(FSDPEngineWithLMHead):
    """Reads the handles of a batch, lays the guidance out as the rows of each micro-batch, and arms the forward.

    The reference policy (a forward-only engine) stays as verl builds it, unquantized.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_config, engine_config, *args, **kwargs)
        self.guided: GuidedForward | None = None
        settings = read_settings(model_config.override_config)
        self._settings = None if engine_config.forward_only else settings
        if self._settings is not None:
            _refuse_unsupported(model_config, engine_config)
            _check_dtype(self._settings, engine_config)
        self._armed = ExitStack()
        self._counts = RowCounts()
        self._pass = RowCounts()
        self._version = 0
        self._observer: SiteObserver | None = None
        self._observed: dict[str, float] = {}

    # -- building -----------------------------------------------------------------------------------------------

    def _build_module(self) -> Any:
        module = super()._build_module()
        if self._settings is not None:
            pad = self.model_config.tokenizer.pad_token_id if self.model_config.tokenizer is not None else None
            self.guided = GuidedForward(module, self._settings, pad or 0)
            keep_own_dtypes(module)
        return module

    def _build_model_optimizer(self) -> None:
        global recipe_hash
        super()._build_model_optimizer()
        if self.guided is not None:
            self.guided.check_applied(self.module)
            recipe_hash = self.guided.recipe.hash
            if self.rank == 0:
                print(f"tracefp4: {self.guided.settings.described(self.guided.recipe)}, every hook applied")

    # -- forward ------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if self.guided is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self.guided.forget_weights(self.module)
        self._pass = RowCounts()
        # The pass for old log-probs, under the weights that the rollout had. What it sees is reported with the update:
        # verl drops the metrics of this pass.
        self._observer = SiteObserver() if forward_only else None
        try:
            output = super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            self._armed.close()
        if self._observer is not None:
            self._observed = over_ranks(self._observer, self.get_data_parallel_group()).metrics()
        if self.guided.builder.guided:
            p = self._pass
            self.guided.watch.note(self._version, p.total, p.guided, p.reasons)
        return output

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if self.guided is not None:
            rows = read_rows(micro_batch)
            guidance, self._counts, self._version = self.guided.micro_batch(
                rows, published_version, probing=self._observer is not None
            )
            # Until the next micro-batch: gradient checkpointing repeats the forward inside backward.
            self._armed.close()
            inputs.update(self._armed.enter_context(self.guided.context.armed(guidance, self._observer)))
        return inputs, output_args

    def forward_step(self, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        if self.guided is None:
            return super().forward_step(micro_batch, loss_function, forward_only)
        assert self._settings is not None
        rollout_logprobs = micro_batch.get("rollout_log_probs", None)
        with self.guided.proving(), losses.beside(self._settings, rollout_logprobs) as beside:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        counts = self._counts
        self._pass.total += counts.total
        self._pass.guided += counts.guided
        self._pass.reasons.update(counts.reasons)
        if not forward_only:
            check_loss(self._settings, beside)
            output["metrics"] |= micro_batch_figures(counts, self.guided.builder.guided, beside, self._observed)
            self._observed = {}
        return loss, output

    # -- checkpoints --------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, *args: Any, **kwargs: Any
    ) -> None:
        super().save_checkpoint(local_path, hdfs_path, global_step, *args, **kwargs)
        if self.guided is not None and self.rank == 0:
            assert self._settings is not None
            checkpoint.write(local_path, self._settings.method, self.guided.recipe, global_step)

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        if self.guided is not None:
            assert self._settings is not None
            note = checkpoint.check(local_path, self._settings.method, self.guided.recipe)
            if self.rank == 0:
                print(f"tracefp4: {note}")
        super().load_checkpoint(local_path, *args, **kwargs)
        if self.guided is not None:
            self.guided.forget_weights(self.module)


def read_rows(micro_batch: Any) -> list[Row]:
    """The sequences of a micro-batch (a TensorDict with nested input_ids and prompts) with what travels beside them."""
    tokens = micro_batch["input_ids"].unbind()
    prompts = micro_batch["prompts"].offsets().diff().tolist()
    taught = [bool(mask.any()) for mask in micro_batch["loss_mask"].unbind()]
    extra = micro_batch.get("extra_fields", None)
    notes = [note_of(extra[i]) for i in range(len(tokens))] if extra is not None else [None] * len(tokens)
    routed = micro_batch.get("routed_experts", None)
    experts = [None] * len(tokens) if routed is None else list(routed.unbind())
    return [Row(*fields) for fields in zip(tokens, prompts, notes, experts, taught, strict=True)]


def _refuse_unsupported(model_config: Any, engine_config: Any) -> None:
    """Raises TracefpError, naming the key, for settings under which guidance would be wrong or silently absent."""
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    qat = getattr(engine_config, "qat", None)
    checks = [
        (engine_config.strategy != "fsdp2", f"{actor}.strategy=fsdp2"),
        (model_config.use_remove_padding, f"{model}.use_remove_padding=False"),
        (model_config.use_fused_kernels, f"{model}.use_fused_kernels=False"),
        (model_config.use_liger, f"{model}.use_liger=False"),
        (model_config.lora_rank > 0, f"{model}.lora_rank=0"),
        (model_config.enable_activation_offload, f"{model}.enable_activation_offload=False"),
        (engine_config.ulysses_sequence_parallel_size > 1, f"{actor}.fsdp_config.ulysses_sequence_parallel_size=1"),
        (bool(qat is not None and qat.enable), f"{actor}.fsdp_config.qat.enable=False (verl's own QAT)"),
    ]
    for wrong, remedy in checks:
        if wrong:
            raise TracefpError(f"tracefp4's guided forward does not support this setting; set {remedy}")


def micro_batch_figures(
    counts: RowCounts, guided: bool, beside: losses.Beside, observed: dict[str, float]
) -> dict[str, Metric]:
    """Of one micro-batch, to be summed over those of an optimizer step; every rank must name the same."""
    figures = {"router/rows": float(counts.forwarded), "router/replayed_rows": float(counts.replayed)}
    if guided:
        figures |= {k: v for k, v in counts.metrics().items() if k != "guidance/guided_share"}
    for name, (total, weight) in beside.sums.items():
        figures |= {name + SUM: float(total), name + WEIGHT: float(weight)}
    summed: dict[str, Metric] = Metric.from_dict(figures | observed, aggregation=AggregationType.SUM)
    return summed


def check_loss(settings: AdapterSettings, beside: losses.Beside) -> None:
    """Raises TracefpError where a method was trained by another loss than its own."""
    wanted = losses.loss_mode(settings.mode)
    if wanted != losses.STOCK and not beside.called:
        raise TracefpError(
            f"method {settings.method} trains by its own loss, which was not called: set "
            f"actor_rollout_ref.actor.policy_loss.loss_mode={wanted}, or a trainer.v1.trainer_mode of this package, "
            "such as tracefp4_sync, which sets it"
        )


def _check_dtype(settings: AdapterSettings, engine_config: Any) -> None:
    """Raises TracefpError where a mode that is about the compute dtype would train in another one."""
    given = (engine_config.mixed_precision or {}).get("param_dtype", "bf16")
    if settings.mode.dtype == "float32" and given not in ("fp32", "float32"):
        raise TracefpError(
            f"method {settings.method} computes in float32 on both paths: set "
            "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32"
        )


def register() -> None:
    take_the_place(TracefpFSDPEngine, "fsdp", "fsdp2")


def take_the_place(engine: type, *backends: str) -> None:
    """Of verl's engines for language models, on our CPU platform and on NVIDIA GPUs; once is enough."""
    held = EngineRegistry._engines.get("language_model", {}).get(backends[-1], {})
    for device, vendor in (("cpu", "cpu"), ("cuda", "nvidia")):
        if (device, vendor) not in held:
            EngineRegistry.register("language_model", list(backends), device=device, vendor=vendor)(engine)
