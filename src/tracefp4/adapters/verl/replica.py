"""The rollout replica: one Ray actor that serves the rollout engine of this package."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import ray
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.config import HFModelConfig
from verl.workers.config import RolloutConfig as VerlRolloutConfig
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from tracefp4.adapters.verl.host import EngineHost
from tracefp4.adapters.verl.probes import PROBED, Probes
from tracefp4.adapters.verl.rows import FIELD, replay_field, stack_experts
from tracefp4.adapters.verl.sampling import RequestSeeds, to_sampling_params
from tracefp4.adapters.verl.segments import make_note
from tracefp4.adapters.verl.settings import KEY, read_settings
from tracefp4.errors import TracefpError
from tracefp4.guidance.disk import make_store
from tracefp4.nn.loading import checkpoint_folder, read_config
from tracefp4.rollout.engine import RolloutConfig, RolloutEngine
from tracefp4.types import Request, Trajectory


def server_name(replica_rank: int) -> str:
    """Ray name of a replica's server, unique within a job's namespace."""
    return f"tracefp4_server_{replica_rank}"


class RolloutServer:
    """The actor. Weights come bucket by bucket, then ``commit_weights`` puts them in use under a version."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int, device: str) -> None:
        self.config: VerlRolloutConfig = omega_conf_to_dataclass(config)
        model: HFModelConfig = omega_conf_to_dataclass(model_config)
        settings = read_settings(model.override_config)
        if settings is None:
            raise TracefpError(f"rollout.name=tracefp4 needs {KEY}.method, such as trace")
        hf_config = read_config(checkpoint_folder(model.local_path))
        self.settings, self.replica_rank = settings, replica_rank
        self.recipe = settings.recipe(hf_config.num_hidden_layers)
        self.store = make_store(settings.guidance)
        c = self.config
        self.max_model_len = c.max_model_len or c.prompt_length + c.response_length
        sizes = RolloutConfig(
            dtype=settings.dtype(c.dtype),
            max_num_seqs=c.max_num_seqs,
            max_tokens_per_step=c.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            cuda_graphs=not c.enforce_eager,
        )
        self.engine = RolloutEngine(hf_config, self.recipe, sizes, self.store, device)
        self.host = EngineHost(self.engine)
        self.seeds = RequestSeeds(c.seed + (0 if c.full_determinism else 1_000_003 * replica_rank))
        self.probes = Probes(settings.probe.every, settings.probe.responses)
        eos = model.tokenizer.eos_token_id
        extra = getattr(model.generation_config, "eos_token_id", None) or []
        self.stop = () if c.ignore_eos else tuple({eos, *([extra] if isinstance(extra, int) else extra)})
        self._arriving: dict[str, Tensor] = {}
        self._awake = asyncio.Event()
        self._awake.set()

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        **other: Any,
    ) -> TokenOutput:
        """One response, or one piece of it. Raises TracefpError for inputs other than text and for what
        ``to_sampling_params`` refuses."""
        if image_data or video_data or any(other.values()):
            raise TracefpError("rollout.name=tracefp4 serves text only: the request has images, video or audio")
        if not self.host.rejecting:  # a replica that rejects may sleep for long
            await self._awake.wait()
        prompt = tuple(int(t) for t in prompt_ids)
        c = self.config
        limit = min(c.response_length, c.prompt_length + c.response_length - len(prompt))
        seed = self.seeds.next(self.engine.version, prompt)
        sampling = to_sampling_params(sampling_params, len(prompt), limit, self.max_model_len, self.stop, seed)
        probe = self.probes.take(self.engine.version, prompt, sampling.temperature)
        # Not verl's id: under full_determinism it comes again with every turn and step, and a record is written once.
        name = f"{self.replica_rank}/{uuid4().hex}{PROBED if probe else ''}"
        request = Request(name, prompt, sampling, probe)
        return self._output(await asyncio.wrap_future(self.host.submit(request)))

    def _output(self, t: Trajectory) -> TokenOutput:
        shape = self.engine.shape
        routed = None
        if self.settings.mode.forward.replay and shape.routed_layers:
            routed = replay_field(t, shape.routed_layers, shape.experts_per_token).numpy()
        return TokenOutput(
            token_ids=list(t.response_ids),
            log_probs=t.logprobs.tolist(),
            routed_experts=routed,
            stop_reason="aborted" if t.finish_reason == "abort" else "completed",
            extra_fields={"global_steps": self.engine.version, FIELD: make_note(t, self.recipe.hash)},
        )

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Ends running requests with what they have.

        Later ones wait for ``resume_generation``; reject_request: they come back aborted, without a token.
        """
        ids = await asyncio.wrap_future(self.host.abort_all(reject_request))
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        await asyncio.wrap_future(self.host.resume())

    # -- weights and memory -------------------------------------------------------------------------------------

    async def receive_weights(self, bucket: dict[str, Tensor]) -> None:
        self._arriving.update(bucket)

    async def commit_weights(self, version: int, recipe_hash: str) -> None:
        """Puts what arrived in use. Raises TracefpError where the sender's recipe differs or weights are missing."""
        arrived, self._arriving = self._arriving, {}
        if recipe_hash != self.recipe.hash:
            raise TracefpError(
                f"the trainer holds recipe {recipe_hash}, replica {self.replica_rank} holds {self.recipe.hash}; start "
                f"both from the same {KEY}"
            )
        await asyncio.wrap_future(self.host.update_weights(stack_experts(arrived.items()), version))
        oldest = version - self.settings.guidance.max_version_diff
        await asyncio.to_thread(self.store.drop_below, oldest)

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Holds back new requests and waits for running ones. Weights and cache stay in memory."""
        self._awake.clear()
        while self.host.running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(self.store.flush, 60.0)

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        self._awake.set()

    async def clear_kv_cache(self) -> None:
        """Nothing to clear: the engine shares no cache between requests."""

    async def release_kv_cache(self) -> None:
        while self.engine.scheduler.unfinished:
            await asyncio.sleep(0.01)

    async def resume_kv_cache(self) -> None:
        pass

    async def start_profile(self, **kwargs: Any) -> None:
        raise TracefpError("rollout.name=tracefp4 has no profiler; set actor_rollout_ref.rollout.profiler.enable=false")

    async def stop_profile(self) -> None:
        pass

    async def recipe_hash(self) -> str:
        return self.recipe.hash


class TracefpReplica(RolloutReplica):
    """One server a replica; tensor, data and pipeline parallel sizes are 1."""

    async def launch_servers(self) -> None:
        """Starts the server beside its worker. Raises TracefpError for parallel sizes other than 1."""
        if self.world_size != 1:
            raise TracefpError(
                "rollout.name=tracefp4 runs one process a replica: set tensor_model_parallel_size, "
                "data_parallel_size and pipeline_model_parallel_size of actor_rollout_ref.rollout to 1 (their product: "
                f"{self.world_size})"
            )
        node, slot = await self.workers[0].__ray_call__.remote(_where)
        device = get_device_name()
        environment = {} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": str(slot)}
        server = ray.remote(RolloutServer).options(
            scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": environment},
            name=server_name(self.replica_rank),
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, self.replica_rank, device)  # fmt: skip
        await server.recipe_hash.remote()  # its settings are checked before the first step
        self.servers = [server]
        self._server_handle = server
        self._server_address = server_name(self.replica_rank)


def _where(worker: Any) -> tuple[str, str]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]
