"""The rollout engine: continuous batching over a paged cache, in FP32, BF16 or FP4, recording guidance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tracefp4.device import machine_memory
from tracefp4.errors import TracefpError
from tracefp4.formats import get_format
from tracefp4.guidance import full_bits
from tracefp4.guidance.recorder import SlotRecorder
from tracefp4.guidance.store import GuidanceStore, MemoryStore
from tracefp4.guidance.stream import GatheredRows
from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.block_manager import BlockManager
from tracefp4.rollout.config import RolloutConfig, check_device, resolve
from tracefp4.rollout.head import keep_heads, take_head
from tracefp4.rollout.kernel_executor import KernelExecutor
from tracefp4.rollout.kernel_model import KernelModel
from tracefp4.rollout.kv_pool import make_kv_pool
from tracefp4.rollout.memory import plan
from tracefp4.rollout.model import Captured, ModelShape, RolloutModel, StepInput
from tracefp4.rollout.native import NativeModel, find_provider
from tracefp4.rollout.paged_pool import slot_bytes
from tracefp4.rollout.sampler import sample
from tracefp4.rollout.scheduler import Scheduled, Scheduler
from tracefp4.rollout.sequence import Drawn, Sequence, Status
from tracefp4.types import GuidanceHandle, OnTurn, Request, Trajectory


class RolloutEngine:
    """Turns requests into trajectories. ``step`` is the whole engine: schedule, run, record, sample.

    hf_config: a transformers config (its sizes are read, none of its code runs), or a ModelShape. recipe: what is
    quantized and what is recorded. store: where records go; a MemoryStore by default. Weights arrive by
    ``update_weights``. kernel_model: runs the forward in place of a model of the engine's own, unless in plain torch.
    """

    def __init__(
        self,
        hf_config: Any,
        recipe: QuantRecipe,
        config: RolloutConfig | None = None,
        store: GuidanceStore | None = None,
        device: str = "cpu",
        kernel_model: KernelModel | None = None,
    ) -> None:
        self.shape = hf_config if isinstance(hf_config, ModelShape) else ModelShape.from_hf(hf_config)
        config = config or RolloutConfig()
        if kernel_model is None:  # one that is given has chosen its kernels
            check_device(config, device)
        self.config = resolve(config, device, self.shape, recipe)
        self.recipe = recipe
        self.store: GuidanceStore = MemoryStore() if store is None else store
        self.device = device
        if recipe.num_layers != self.shape.layers:
            raise TracefpError(f"the recipe is for {recipe.num_layers} layers, the checkpoint has {self.shape.layers}")
        if self.config.max_model_len > self.shape.max_positions:
            raise TracefpError(
                f"rollout.max_model_len {self.config.max_model_len} exceeds the checkpoint's "
                f"max_position_embeddings {self.shape.max_positions}"
            )
        self._version = -1
        c = self.config
        dtype = getattr(torch, c.dtype)
        per_seq = -(-c.max_model_len // c.page_size)
        self._check_widths()
        num_pages = plan(self.shape, recipe, c).pages if c.memory_gb else c.num_pages or c.max_num_seqs * per_seq
        slots = num_pages * c.page_size
        self._check_memory(slots)
        self.blocks = BlockManager(num_pages, c.page_size, c.prefix_caching)
        self.scheduler = Scheduler(self.blocks, c.max_num_seqs, c.max_tokens_per_step)
        self._by_id: dict[str, Sequence] = {}
        self._ended: list[Trajectory] = []
        self._ending: deque[tuple[Sequence, GatheredRows | None, GatheredRows | None]] = deque()
        self.kernels: KernelExecutor | None = None
        if c.backend != "torch":
            if kernel_model is None and c.backend == "native":
                kernel_model = NativeModel(self.shape, recipe, dtype, device, find_provider(device))
            kernel_model = kernel_model or KernelModel(self.shape, recipe, dtype, device, "triton")
            self.model: RolloutModel = kernel_model
            self.kernels = KernelExecutor(kernel_model, recipe, c, num_pages)
            return
        self.model = RolloutModel(self.shape, recipe, dtype, device)
        kv_scale = recipe.site_encode_scale("key")
        self.pool = make_kv_pool(
            self.shape.layers,
            slots,
            self.shape.kv_heads,
            self.shape.head_dim,
            dtype,
            recipe.kv,
            float(kv_scale) if kv_scale is not None else None,
            device,
        )
        self._make_recorders(slots)

    def _check_widths(self) -> None:
        """Refuses widths that do not split into whole blocks, by the checkpoint's own names for them."""
        s, r = self.shape, self.recipe
        for name in (r.weights, r.activations):
            block = 1 if name is None else get_format(name).block_size
            for field, width in (("hidden_size", s.hidden), (s.expert_width_field, s.expert_width)):
                if width % block:
                    raise TracefpError(
                        f"the checkpoint's {field} {width} is not a multiple of the {name} block of {block}: "
                        'set quant.weights="none" and quant.activations="none" for this model'
                    )

    def _check_memory(self, slots: int) -> None:
        """Refuses a cache larger than the machine's memory, which would end the process instead of failing."""
        s, dtype = self.shape, getattr(torch, self.config.dtype)
        if self.config.backend == "torch":
            bits = 4.5 if self.recipe.kv is not None else 8 * dtype.itemsize
            need = slots * s.layers * 2 * s.kv_heads * s.head_dim * bits / 8
        else:
            need = slots * slot_bytes(s, self.recipe, dtype)
        if self.device in ("cpu", "meta"):  # meta: nothing is allocated, the limits are checked all the same
            have = machine_memory()
        else:
            have = torch.cuda.get_device_properties(self.device).total_memory
        if need > have:
            raise TracefpError(
                f"the KV cache would take {need / 2**30:.1f} GiB of {have / 2**30:.1f} GiB: lower "
                "rollout.max_num_seqs, rollout.max_model_len or rollout.num_pages"
            )

    def _make_recorders(self, slots: int) -> None:
        s = self.shape
        kv_width = s.kv_heads * s.head_dim
        widths = {"expert_input": s.hidden, "key": kv_width, "value": kv_width}
        self.recorder: SlotRecorder | None = None
        self.probe: SlotRecorder | None = None
        if self.recipe.guided_layers:
            self.recorder = SlotRecorder(
                self.recipe, self.recipe.guided_layers, self.recipe.bits, slots, widths, self.device
            )
        self._slots, self._widths = slots, widths
        self._experts = torch.zeros(slots, s.routed_layers, s.experts_per_token, dtype=torch.int16, device=self.device)

    def _probe_recorder(self) -> SlotRecorder | None:
        """A recorder of full codes in all layers; made when the first request asks for it, since it is large.

        Each site keeps the full width of its own format.
        """
        full = [full_bits(name) for name in (self.recipe.activations, self.recipe.kv) if name]
        if not full:
            return None
        return SlotRecorder(self.recipe, range(self.shape.layers), max(full), self._slots, self._widths, self.device)

    # -- weights ----------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Policy version of the weights in use; -1 before the first update."""
        return self._version

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights between steps; running sequences go on under the new ones, their rows marked so.

        Raises TracefpError and keeps the old weights where a tensor is missing, misshapen or not finite, or where
        the version does not rise.
        """
        if version <= self._version:
            raise TracefpError(f"policy version must rise: the engine holds {self._version}, the update is {version}")
        if self.kernels is not None:
            self.kernels.runner.drop()
        self.scheduler.forget_prefixes()
        self.model.load(weights)
        self._version = version

    def _check_ready(self) -> None:
        if self._version < 0 and not self.model.broken:
            raise TracefpError("the engine has no weights yet; call update_weights first")
        if self.model.broken:
            raise TracefpError("the last weight update broke off halfway; call update_weights again")

    # -- requests ---------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises TracefpError naming the limit where it can never run."""
        c, total = self.config, len(request.prompt_ids) + request.sampling.max_new_tokens
        if request.request_id in self._by_id:
            raise TracefpError(f"request id {request.request_id} is already in the engine")
        if request.request_id in self.store:
            raise TracefpError(f"request id {request.request_id} has a record in the guidance store; discard it first")
        if not request.prompt_ids:
            raise TracefpError(f"request {request.request_id} has an empty prompt")
        if not all(0 <= t < self.shape.vocab for t in request.prompt_ids):
            raise TracefpError(f"request {request.request_id} has a token id outside 0..{self.shape.vocab - 1}")
        if total > c.max_model_len:
            raise TracefpError(
                f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens + "
                f"{request.sampling.max_new_tokens} new exceed rollout.max_model_len {c.max_model_len}"
            )
        if self.blocks.pages_for(total) > self.blocks.num_pages:
            raise TracefpError(
                f"request {request.request_id} needs {self.blocks.pages_for(total)} cache pages of {c.page_size}, "
                f"the engine has {self.blocks.num_pages}; raise rollout.num_pages"
            )
        if request.sampling.top_logprobs and self.kernels is not None:
            self.kernels.runner.keep_heads(request.sampling.top_logprobs)
        if request.probe and self.kernels is not None:
            self.kernels.expect_probes()
        elif request.probe and self.probe is None:
            self.probe = self._probe_recorder()
        seq = Sequence(request)
        self._by_id[request.request_id] = seq
        self.scheduler.add(seq)

    def abort(self, request_id: str) -> Trajectory:
        """Ends a request now and returns what it has; its record is flushed before its pages go.

        Where its last rows are not in the cache (it waited, was half prefilled or preempted), the record holds the
        rows there are, the others have version -1, and routed_experts is None.
        """
        seq = self._by_id.get(request_id)
        if seq is not None:
            if seq.status is not Status.FINISHED:
                seq.finish_reason = "abort"
                self._finish(seq)
            self._collect(wait=True)
        for i, own in enumerate(self._ended):
            if own.request_id == request_id:
                return self._ended.pop(i)
        raise TracefpError(f"request id {request_id} is not in the engine")

    @property
    def busy(self) -> bool:
        """Whether requests are unfinished or trajectories not handed out yet: ``step`` has something to do."""
        return bool(self._by_id or self._ended)

    # -- the step ---------------------------------------------------------------------------------------------

    def step(self, on_turn: OnTurn | None = None) -> list[Trajectory]:
        """One step of the engine; returns the trajectories that ended in it. on_turn: asked where a turn ended."""
        self._check_ready()
        batch = self.scheduler.schedule()
        if batch:
            self._hand_out(batch, self._run(batch), on_turn)
        # Over the kernels what ended is worked off in the next step, while the device computes, where there is one.
        last = not self.scheduler.unfinished
        if last or not batch or self.kernels is None:
            self._collect(wait=last)
        ended, self._ended = self._ended, []
        return ended

    def _run(self, batch: list[Scheduled]) -> list[Drawn]:
        """Forwards and records the batch; what was drawn for every sequence whose rows are complete."""
        if self.kernels is not None:
            # Slots of the tokens to come: of these steps and of the next, so that they can be launched at once.
            more = 2 * self.kernels.runner.burst - 1
            for s in batch:
                seq = s.seq
                if len(seq.tokens) + more > len(seq.block_table) * self.blocks.page_size:
                    last = seq.num_prompt + seq.request.sampling.max_new_tokens
                    self.blocks.reserve(seq, min(len(seq.tokens) + more, last))
            return self.kernels.run(batch, lambda: self._collect(wait=False))
        step = self._prepare(batch)
        logits, captured = self.model.forward(step, self.pool)
        self._record(batch, step, captured)
        seqs = [s.seq for s in batch if s.samples]
        if not seqs:
            return []
        positions = torch.tensor([len(s.tokens) for s in seqs], device=logits.device)
        ids, logprobs = sample(logits, [s.request.sampling for s in seqs], positions)
        keep_heads(seqs, logits)
        return [([i], [p]) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]

    def generate(
        self,
        requests: Seq[Request],
        *,
        on_turn: OnTurn | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Trajectory]:
        """Runs requests to their end; the result has their order. progress(n) is told of n finished ones.

        on_turn: answers a turn that a stop token ended; the sequence goes on from its cache, every turn keeps its
        rows and records. All or nothing: an error leaves the engine idle and none of these records in the store.
        Raises TracefpError where a request can never run, or where requests of ``add_request`` are unfinished.
        """
        if self.scheduler.unfinished:
            raise TracefpError(f"generate needs an idle engine; {self.scheduler.unfinished} requests are unfinished")
        done: dict[str, Trajectory] = {}
        added: list[str] = []
        try:
            for r in requests:
                self.add_request(r)
                added.append(r.request_id)
            while len(done) < len(requests):
                ended = self.step(on_turn)
                done.update((t.request_id, t) for t in ended)
                if progress and ended:
                    progress(len(ended))
        except BaseException:
            for seq in self._by_id.values():
                self.scheduler.finish(seq, "abort")
            self._by_id.clear()
            self._ending.clear()
            self._ended.clear()
            # By id: a sequence that ended in the very step that raised has a record, but no trajectory yet.
            names = [name for i in added for name in (i, f"{i}/probe")]
            self.store.discard([GuidanceHandle(name, 0, self.recipe.hash) for name in names])
            raise
        return [done[r.request_id] for r in requests]

    def _prepare(self, batch: list[Scheduled]) -> StepInput:
        """Flattens the scheduled rows into tensors."""
        size, device = self.config.page_size, self.device
        lengths = torch.tensor([s.stop - s.start for s in batch])
        starts = torch.tensor([s.start for s in batch])
        B, Q, T = len(batch), int(lengths.max()), max(s.stop for s in batch)
        tokens = [t for s in batch for t in s.seq.tokens[s.start : s.stop]]
        offset = lengths.cumsum(0) - lengths
        query = torch.arange(Q)
        pad_index = torch.where(query < lengths[:, None], offset[:, None] + query, -1)
        positions = torch.cat([torch.arange(s.start, s.stop) for s in batch]) if Q > 1 else starts
        pages = max(len(s.seq.block_table) for s in batch)
        tables = torch.tensor([s.seq.block_table + [0] * (pages - len(s.seq.block_table)) for s in batch])
        at = torch.arange(T)
        context = tables[:, at // size] * size + at % size
        sequence = torch.repeat_interleave(torch.arange(B), lengths)
        last = torch.tensor([int(o + n) - 1 for s, o, n in zip(batch, offset, lengths, strict=True) if s.samples])
        moved = (
            torch.tensor(tokens),
            positions,
            context[sequence, positions],
            pad_index,
            context,
            last.long(),
        )
        return StepInput(*(x.to(device) for x in moved))

    def _record(self, batch: list[Scheduled], step: StepInput, captured: Captured) -> None:
        """Writes the step's rows to the slot buffers; the same rows may be written again."""
        if self.recorder is not None:
            self.recorder.write(step.slots, captured.blocks)
        if self.probe is not None and any(s.seq.request.probe for s in batch):
            flags = [s.seq.request.probe for s in batch for _ in range(s.stop - s.start)]
            rows = torch.tensor(flags, device=self.device).nonzero()[:, 0]
            self.probe.write(step.slots[rows], captured.blocks, rows)
        if captured.experts is not None:
            self._experts.index_copy_(0, step.slots, captured.experts)

    def _hand_out(self, batch: list[Scheduled], drawn: list[Drawn], on_turn: OnTurn | None) -> None:
        """Hands every sequence its tokens, and ends those whose response is over."""
        seqs = [s.seq for s in batch if s.samples]
        # Settled only now: where sampling raises, the same rows simply run again.
        self.scheduler.settle()
        version = self._version
        for s in batch:
            s.seq.num_computed = s.stop
            new = s.stop - len(s.seq.row_versions)  # with the rows it shares, which are of these weights too
            if new == 1:
                s.seq.row_versions.append(version)
            else:
                s.seq.row_versions.extend([version] * new)
        for seq, (tokens, logprobs) in zip(seqs, drawn, strict=True):
            seq.extend(tokens, logprobs, version)
            if len(tokens) > 1:  # each but the last was forwarded, too
                seq.num_computed += len(tokens) - 1
                seq.row_versions.extend([version] * (len(tokens) - 1))
            if on_turn is not None and seq.finish_reason == "stop":
                self._ask(seq, on_turn)
        for seq in seqs:
            if seq.finish_reason:
                self._finish(seq)

    def _ask(self, seq: Sequence, on_turn: OnTurn) -> None:
        """Appends the environment's answer to the turn that just ended, where it has one."""
        request = seq.request
        reply = on_turn(request.request_id, seq.turn)
        if not reply:
            return
        if not all(0 <= t < self.shape.vocab for t in reply):
            raise TracefpError(
                f"the answer to a turn of request {request.request_id} has a token id outside 0..{self.shape.vocab - 1}"
            )
        seq.continue_with(list(reply))

    def _finish(self, seq: Sequence) -> None:
        """Asks for the record, then releases the pages; the trajectory follows in ``_collect``."""
        # A sampled token that was never forwarded has no row; an aborted sequence may lack more.
        rows = seq.num_computed
        if seq.finish_reason != "abort" and rows != len(seq.tokens) - 1:
            raise AssertionError(f"{seq.request.request_id}: {rows} rows for {len(seq.tokens)} tokens")
        slots = self.blocks.slots(seq, 0, rows)
        if self.kernels is None:
            self._end(seq, *self._records(seq, slots.to(self.device)))
        else:
            probe = self.kernels.probe if seq.request.probe else None
            gathered = [r.gather(slots) if r is not None else None for r in (self.kernels.recorder, probe)]
            self._ending.append((seq, gathered[0], gathered[1]))
        self.scheduler.finish(seq, seq.finish_reason or "abort")

    def _collect(self, wait: bool) -> None:
        """Ends sequences whose records have reached the host. wait: all of them."""
        if self.kernels is not None:
            self.kernels.poll(wait)
        while self._ending and all(r is None or r.ready for r in self._ending[0][1:]):
            seq, own, probe = self._ending.popleft()
            name = seq.request.request_id
            has_experts = own is not None and own.layout.routed[0]
            guided = own is not None and own.layout.sizes
            rows = self._row_fields(seq) if guided or probe is not None else ()
            self._end(
                seq,
                own.experts() if own is not None and has_experts else None,
                self.store.put(name, own.guidance(*rows)) if own is not None and guided else None,
                self.store.put(f"{name}/probe", probe.guidance(*rows)) if probe is not None else None,
            )

    def _records(
        self, seq: Sequence, slots: Tensor
    ) -> tuple[Tensor | None, GuidanceHandle | None, GuidanceHandle | None]:
        """(experts of the rows, record, probe) by slot, of the torch backend."""
        name = seq.request.request_id
        experts = self._experts[slots].cpu() if self._experts.shape[1] else None
        probe = self._store(seq, self.probe, slots, f"{name}/probe") if seq.request.probe else None
        return experts, self._store(seq, self.recorder, slots, name), probe

    def _end(
        self, seq: Sequence, experts: Tensor | None, guidance: GuidanceHandle | None, probe: GuidanceHandle | None
    ) -> None:
        """experts: of the rows there are."""
        row_versions = torch.tensor(seq.row_versions, dtype=torch.int32)
        missing = len(seq.tokens) - 1 - len(row_versions)
        if missing:
            experts, row_versions = None, F.pad(row_versions, (0, missing), value=-1)
        if experts is not None:
            experts[: seq.num_recomputed] = -1  # two passes chose them; neither is right for all later tokens
        trajectory = Trajectory(
            request_id=seq.request.request_id,
            prompt_ids=tuple(seq.request.prompt_ids),
            response_ids=seq.response,
            logprobs=torch.tensor(seq.logprobs),
            versions=torch.tensor(seq.versions, dtype=torch.int32),
            row_versions=row_versions,
            routed_experts=experts,
            finish_reason=seq.finish_reason or "abort",
            sampled=None if all(seq.sampled) else torch.tensor(seq.sampled),
            guidance=guidance,
            probe=probe,
            head=take_head(seq),
        )
        del self._by_id[seq.request.request_id]
        self._ended.append(trajectory)

    def _row_fields(self, seq: Sequence) -> tuple[Tensor, Tensor, Tensor]:
        """(token ids int32, versions int32, valid bool) of the rows there are."""
        n = seq.num_computed
        tokens = torch.tensor(seq.tokens[:n], dtype=torch.int32)
        return tokens, torch.tensor(seq.row_versions, dtype=torch.int32), torch.arange(n) >= seq.num_recomputed

    def _store(
        self, seq: Sequence, recorder: SlotRecorder | None, slots: Tensor, sample_id: str
    ) -> GuidanceHandle | None:
        if recorder is None:
            return None
        return self.store.put(sample_id, recorder.gather(slots, *self._row_fields(seq)))
