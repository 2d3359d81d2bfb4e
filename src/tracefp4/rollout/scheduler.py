"""Which rows run in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from tracefp4.rollout.block_manager import BlockManager
from tracefp4.rollout.sequence import Sequence, Status


@dataclass(slots=True)  # not frozen: one is made for every token, and a frozen one takes three times as long
class Scheduled:
    """Rows [start, stop) of one sequence. samples: whether the last of them predicts a token still unknown."""

    seq: Sequence
    start: int
    stop: int
    samples: bool


class Scheduler:
    """Continuous batching. A step is a prefill of waiting prompts (chunked to the token budget), a prefill of what
    environments answered to running sequences, or one decode row of every running sequence; prefill goes first, so
    that finished sequences are replaced at once."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_tokens_per_step: int) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_tokens_per_step = max_tokens_per_step
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_shared_rows = 0
        self._settled = True

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def schedule(self) -> list[Scheduled]:
        if not self._settled:  # what is known as computed may not be
            self.forget_prefixes()
        batch = self._schedule_prefill() or self._schedule_turns() or self._schedule_running(self.running, None)
        self._settled = not batch
        return batch

    def _schedule_prefill(self) -> list[Scheduled]:
        batch: list[Scheduled] = []
        budget = self.max_tokens_per_step
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not seq.block_table:
                self.blocks.share(seq)
            start = max(seq.num_computed, seq.num_shared)
            stop = min(len(seq.tokens), start + budget)
            # One token beyond the known ones, so that admission does not preempt a running sequence next step.
            reserve = len(seq.tokens) + (1 if self.running else 0)
            if not self.blocks.can_grow(seq, reserve):
                if not seq.num_computed and len(seq.block_table) * self.blocks.page_size == seq.num_shared:
                    self.blocks.release(seq)  # what it shares waits for nobody
                break
            # All pages of the prompt at once: a half-prefilled prompt that waits for pages could block everyone.
            self.blocks.grow(seq, len(seq.tokens))
            self.blocks.publish(seq, stop)
            batch.append(Scheduled(seq, start, stop, stop == len(seq.tokens)))
            budget -= stop - start
            self.num_shared_rows += start if not seq.num_computed else 0
            if stop == len(seq.tokens):
                self.waiting.popleft()
                seq.status = Status.RUNNING
                self.running.append(seq)
            else:
                break  # the budget ended inside this prompt; it goes on in the next step
        return batch

    def _schedule_turns(self) -> list[Scheduled]:
        """Rows of new turns: the last sampled token and the environment's answer, chunked to the token budget."""
        turns = [s for s in self.running if len(s.tokens) - s.num_computed > 1]
        return self._schedule_running(turns, self.max_tokens_per_step) if turns else []

    def _schedule_running(self, wanted: Iterable[Sequence], budget: int | None) -> list[Scheduled]:
        """Pending rows of running sequences; where pages run out, sequences are preempted, the youngest first."""
        batch: list[Scheduled] = []
        pending = deque(wanted)
        page_size = self.blocks.page_size
        while pending and (budget is None or budget > 0):
            seq = pending.popleft()
            rows = len(seq.tokens)
            if budget is None and rows <= len(seq.block_table) * page_size:  # nearly every decode row
                batch.append(Scheduled(seq, seq.num_computed, rows, True))
                continue
            while seq.status is Status.RUNNING and not self.blocks.can_grow(seq, len(seq.tokens)):
                victim = next(s for s in reversed(self.running) if s is seq or not any(b.seq is s for b in batch))
                self._preempt(victim)
                if victim in pending:
                    pending.remove(victim)
            if seq.status is not Status.RUNNING:
                continue
            self.blocks.grow(seq, len(seq.tokens))
            stop = len(seq.tokens) if budget is None else min(len(seq.tokens), seq.num_computed + budget)
            batch.append(Scheduled(seq, seq.num_computed, stop, stop == len(seq.tokens)))
            budget = None if budget is None else budget - (stop - seq.num_computed)
        return batch

    def _preempt(self, seq: Sequence) -> None:
        """Takes the pages away; all rows are computed again later, and are marked so."""
        self.num_preemptions += 1
        seq.num_recomputed = max(seq.num_recomputed, seq.num_computed)
        seq.num_computed = 0
        seq.row_versions.clear()
        self.blocks.release(seq)
        self._to_waiting(seq)

    def _to_waiting(self, seq: Sequence) -> None:
        """Next in line, but never before a half-prefilled prompt, which holds pages and must get out first."""
        seq.status = Status.WAITING
        self.running.remove(seq)
        self.waiting.insert(1 if self.waiting and self.waiting[0].block_table else 0, seq)

    def settle(self) -> None:
        """The rows that ``schedule`` asked for last are in the cache. Where a step broke off this is not called."""
        self._settled = True

    def forget_prefixes(self) -> None:
        """Ends sharing so far, as new weights do. Sequences that share rows and have none of their own begin anew."""
        self.blocks.forget()
        for seq in [*self.running, *self.waiting]:
            seq.num_old = seq.num_computed
            if not seq.num_shared or seq.num_computed:
                continue
            self.blocks.release(seq)
            if seq.status is Status.RUNNING:
                self._to_waiting(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        self.blocks.release(seq)
