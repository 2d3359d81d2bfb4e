"""verl's Megatron engine with the guided forward. Without settings of ours it is verl's own, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.package_info import __version__
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from tracefp4.adapters.megatron.context import LocalMicroBatch, ScheduledContext
from tracefp4.adapters.megatron.layout import localize, rank_layout, row_numbers
from tracefp4.adapters.megatron.prepare import check_chunks, local_layers, moe_layers, prepare_chunks, unwrapped
from tracefp4.adapters.megatron.refusals import refuse_config
from tracefp4.adapters.megatron.spec import guided_layer_spec
from tracefp4.adapters.megatron.versions import check_megatron_version
from tracefp4.adapters.verl import engine as state
from tracefp4.adapters.verl import losses
from tracefp4.adapters.verl.engine import read_rows
from tracefp4.adapters.verl.guided import GuidedForward, Row
from tracefp4.adapters.verl.probes import over_ranks
from tracefp4.adapters.verl.settings import AdapterSettings, read_settings
from tracefp4.errors import TracefpError
from tracefp4.nn import SiteObserver
from tracefp4.train.slices import RowCounts
from tracefp4.types import SITES

MEGATRON = "actor_rollout_ref.actor.megatron"


class GuidedMegatron(GuidedForward):
    """The chunks of one rank (one of each virtual pipeline stage), and micro-batches laid out as Megatron lays tokens.

    Raises TracefpError as ``prepare_chunks`` does, and where the guidance store cannot be opened.
    """

    context: ScheduledContext

    def __init__(self, chunks: Sequence[nn.Module], settings: AdapterSettings, hf_config: Any, pad_id: int = 0) -> None:
        super().__init__(list(chunks), settings, pad_id, hf_config)

    def _prepare(self, model: Any) -> tuple[ScheduledContext, tuple[int, ...]]:
        self._layers = frozenset(local_layers(model))
        self._config = unwrapped(model[0]).config
        # Under full recomputation the quantized experts of all layers never lie in memory together.
        keep = self._config.recompute_granularity != "full"
        return prepare_chunks(model, self.recipe, self.forward, keep_weights=keep), moe_layers(self._config)

    def check_applied(self, model: Any) -> None:
        check_chunks(model, self.context)

    def _expected_sites(self) -> set[tuple[str, int]]:
        return {(s, i) for s in SITES for i in self._layers if s != "expert_input" or i in self.moe_layers}

    def forget_weights(self, model: Any) -> None:
        self.context.weights_changed()

    def local_micro_batch(
        self,
        rows: Sequence[Row],
        version: int | None,
        lay_out: Callable[[Tensor], Tensor],
        device: torch.device | str,
        probing: bool = False,
    ) -> tuple[LocalMicroBatch, RowCounts, int]:
        """As ``micro_batch``, of the rows that this rank computes. lay_out: a nested tensor [B, ragged] as the tokens'
        own, to what the model is given in their place, [b, s] with 0 for padding."""
        rows = [replace(row, tokens=row.tokens.cpu()) for row in rows]
        micro_batch, counts, version = self.micro_batch(rows, version, probing)
        lengths = [len(row.tokens) for row in rows]
        numbers = lay_out(torch.nested.as_nested_tensor(row_numbers(lengths), layout=torch.jagged))
        rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
        layout = rank_layout(numbers, self._config, rank, size)
        tokens = nn.utils.rnn.pad_sequence([row.tokens for row in rows], batch_first=True)
        return localize(micro_batch, layout, self._layers, tokens.flatten(), device), counts, version


class TracefpMegatronEngine(MegatronEngineWithLMHead):
    """Builds the model from a guided layer spec, and arms each micro-batch for its forward and its recomputation.

    The reference policy (a forward-only engine) stays as verl builds it, unquantized.
    """

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        self.guided: GuidedMegatron | None = None
        settings = read_settings(model_config.override_config)
        self._settings = None if engine_config.forward_only else settings
        if self._settings is not None:
            check_megatron_version(__version__)
            _refuse_unsupported(self._settings, model_config, engine_config)
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._armed = ExitStack()
        self._counts = RowCounts()
        self._pass = RowCounts()
        self._version = 0
        self._observer: SiteObserver | None = None
        self._observed: dict[str, float] = {}

    # -- building -----------------------------------------------------------------------------------------------

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        if self._settings is not None:
            recipe = self._settings.recipe(self.model_config.hf_config.num_hidden_layers)
            prefix = f"{MEGATRON}.override_transformer_config."
            refuse_config(self.provider, recipe, self._settings.mode.forward, prefix)
            self.provider.transformer_layer_spec = _guided_spec(self.provider.transformer_layer_spec)

    def _build_megatron_module(self) -> Any:
        module = super()._build_megatron_module()
        if self._settings is not None:
            pad = self.model_config.tokenizer.pad_token_id if self.model_config.tokenizer is not None else None
            self.guided = GuidedMegatron(module, self._settings, self.model_config.hf_config, pad or 0)
        return module

    def initialize(self) -> None:
        super().initialize()
        if self.guided is not None:
            self.guided.check_applied(self.module)
            state.recipe_hash = self.guided.recipe.hash
            if torch.distributed.get_rank() == 0:
                print(f"tracefp4: {self.guided.settings.described(self.guided.recipe)}, every hook applied")

    # -- forward ------------------------------------------------------------------------------------------------

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        if self.guided is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self.guided.forget_weights(self.module)
        self._pass = RowCounts()
        self._observer = SiteObserver() if forward_only else None  # as in the FSDP engine
        try:
            with self.guided.proving():
                output = super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            self.guided.context.rest()
        if self._observer is not None:
            # Of all ranks: those of other pipeline stages have other layers, those beside them other heads and rows.
            self._observed = over_ranks(self._observer).metrics()
        if self.guided.builder.guided:
            p = self._pass
            self.guided.watch.note(self._version, p.total, p.guided, p.reasons)
        return output

    def forward_step(
        self, batch_iter: Iterator[Any], model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        with ExitStack() as self._armed:
            return super().forward_step(batch_iter, model, logits_processor_func, postprocess_micro_batch_func)

    def prepare_model_inputs(self, batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_model_inputs(batch)
        if self.guided is not None:
            micro_batch, self._counts, self._version = self.guided.local_micro_batch(
                read_rows(batch),
                state.published_version,
                lambda nested: self._lay_out(nested, batch),
                batch["input_ids"].device,
                probing=self._observer is not None,
            )
            self._armed.enter_context(self.guided.context.armed(micro_batch, self._observer))
            self._pass.total += self._counts.total
            self._pass.guided += self._counts.guided
            self._pass.reasons.update(self._counts.reasons)
        return inputs

    def _lay_out(self, nested: Tensor, batch: Any) -> Tensor:
        """By the very functions that verl lays the tokens out with (``gptmodel_forward_model_engine``)."""
        config = self.engine_config
        if config.use_remove_padding:
            bucket = config.pad_to_length_bucket if config.pad_to_length else None
            return preprocess_thd_engine(nested, pad_to_length_bucket=bucket)[0]
        longest = tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
        return preprocess_bshd_engine(nested, forced_max_seqlen=longest)[0]

    def postprocess_micro_batch_func(
        self, output: Any, data: Any, forward_only: bool, loss_function: Any, local_cp_size: int | None = None
    ) -> Any:
        given = (output, data, forward_only, loss_function, local_cp_size)
        if self.guided is None:
            return super().postprocess_micro_batch_func(*given)
        assert self._settings is not None
        with losses.beside(self._settings, data.get("rollout_log_probs", None)) as beside:
            result = super().postprocess_micro_batch_func(*given)
        if not forward_only:
            state.check_loss(self._settings, beside)
            metrics, guided = result[-1]["metrics"], self.guided.builder.guided
            metrics |= state.micro_batch_figures(self._counts, guided, beside, self._observed)
            self._observed = {}
        return result


def _guided_spec(spec: Any) -> Any:
    """A provider's layer spec, or the function that makes it, with guided layers in it."""
    if isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        return guided_layer_spec(spec)
    by_stage = "vp_stage" in inspect.signature(spec).parameters

    def build(config: Any, vp_stage: int | None = None) -> Any:
        return guided_layer_spec(spec(config, vp_stage=vp_stage) if by_stage else spec(config))

    return build


def _refuse_unsupported(settings: AdapterSettings, model_config: Any, engine_config: Any) -> None:
    """Raises TracefpError, naming the key, for settings under which guidance would be wrong or silently absent."""
    model = "actor_rollout_ref.model"
    kind = model_config.hf_config.model_type
    if kind != "qwen3_moe":
        raise TracefpError(
            f"model type {kind!r} is not supported under Megatron, qwen3_moe is; dense Qwen3 models train with "
            "actor_rollout_ref.actor.strategy=fsdp2"
        )
    lora = getattr(model_config, "lora", None) or {}
    expert_tensor = engine_config.expert_tensor_parallel_size or engine_config.tensor_model_parallel_size
    checks = [
        (engine_config.vanilla_mbridge, f"{MEGATRON}.vanilla_mbridge=False"),
        (engine_config.use_megatron_fsdp, f"{MEGATRON}.use_megatron_fsdp=False"),
        (engine_config.dynamic_context_parallel, f"{MEGATRON}.dynamic_context_parallel=False"),
        (
            engine_config.router_replay.mode != "disabled",
            f"{MEGATRON}.router_replay.mode=disabled (the guided forward replays the routing by itself)",
        ),
        (engine_config.qat.enable, f"{MEGATRON}.qat.enable=False (verl's own QAT)"),
        (model_config.use_fused_kernels or engine_config.use_fused_kernels, f"{model}.use_fused_kernels=False"),
        (model_config.mtp.enable, f"{model}.mtp.enable=False"),
        (lora.get("rank", 0) > 0, f"{model}.lora.rank=0"),
        (engine_config.dtype != "bfloat16", f"{MEGATRON}.dtype=bfloat16"),
        (expert_tensor > 1, f"{MEGATRON}.expert_tensor_parallel_size=1"),
    ]
    for wrong, remedy in checks:
        if wrong:
            raise TracefpError(f"tracefp4's guided forward does not support this setting under Megatron; set {remedy}")
    if settings.mode.dtype == "float32":
        raise TracefpError(
            f"method {settings.method} computes in float32 on both paths, which verl's Megatron engine does not; set "
            "actor_rollout_ref.actor.strategy=fsdp2"
        )


def register() -> None:
    state.take_the_place(TracefpMegatronEngine, "megatron")
