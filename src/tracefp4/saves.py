"""What a run writes besides its figures: states, checkpoints, the best policy. None of it may end a run of a night.

A save that fails is warned about once for each kind, counted, and tried again when the next one is due; what was saved
before stays whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracefp4.files import StorageError, free_bytes, recover_dir, size_of, sweep_files, warn

STATES, CHECKPOINT, BEST, BEST_FACTS = "states", "checkpoint", "checkpoint-best", "best.json"
FIGURES_BYTES_PER_STEP = 16 << 10


@dataclass(frozen=True)
class SaveSizes:
    """Upper estimates in bytes: of a state (FP32 masters and both AdamW moments) and of a checkpoint."""

    state: int
    policy: int

    @staticmethod
    def of(num_params: int, itemsize: int) -> SaveSizes:
        """itemsize: bytes of a weight in the compute dtype."""
        return SaveSizes(state=12 * num_params + (256 << 10), policy=itemsize * num_params + (1 << 20))

    def of_run(self, run: Any) -> int:
        """Most that a run holds at once: a save lies beside the one it replaces until it is whole. run: LoopConfig."""
        states = (run.keep_states + 1) * self.state if run.state_every else 0
        return states + (2 + 2 * run.keep_best) * self.policy + run.steps * FIGURES_BYTES_PER_STEP

    def published(self, run: Any) -> int:
        """Most that the weights take which an asynchronous run passes on: while the rollout takes one step the trainer
        can take as many as it lags, each with a file, and one more is half written. run: LoopConfig."""
        return (run.max_lag + 3) * self.policy if run.asynchronous else 0


Pending = tuple[int, dict[str, float], dict[str, float], list[dict[str, Any]]]
"""(index, metrics, timing, lines for samples.jsonl) of a step."""


@dataclass
class Position:
    """Where a run stands.

    finished: steps in metrics.jsonl. start: held-out pass rate of the first policy. pending: a step that is trained and
    not yet logged. saved: steps trained when the last state was written.
    """

    finished: int = 0
    start: float | None = None
    pending: Pending | None = None
    saved: int = 0

    @property
    def unlogged(self) -> Pending | None:
        """``pending``, unless its step has been logged since."""
        return self.pending if self.pending is not None and self.pending[0] == self.finished else None

    @property
    def trained(self) -> int:
        """Steps whose update is in the weights."""
        return self.finished + (self.unlogged is not None)


def check_space(folder: Path, need: int, weights: int = 0, guidance: int = 0) -> None:
    """Raises StorageError where the disk under ``folder`` has less free than ``need`` bytes of states and checkpoints,
    and of the weights and guidance that processes pass each other."""
    free, total = free_bytes(folder), need + weights + guidance
    if free >= total:
        return
    passed = [f"{_mib(n)} {what}" for n, what in ((weights, "weights"), (guidance, "guidance")) if n]
    between = f", {' and '.join(passed)} on their way between its processes among it," if passed else ""
    remedies = "lower run.keep_states (run.state_every=0 writes no state)"
    if passed:
        remedies += ", run.max_lag" if weights else ""
        remedies += ", guidance.keep_gb or sampling.prompts_per_step" if guidance else ""
    raise StorageError(
        f"{folder} needs up to {_mib(total)} for states and checkpoints{between} and its disk has {_mib(free)} free: "
        f"free some, choose another --out, or {remedies}"
    )


def check_guidance_space(folder: Path, need: int) -> None:
    """As ``check_space``, for records on a disk of their own."""
    if (free := free_bytes(folder)) < need:
        raise StorageError(
            f"guidance.url {folder} needs up to {_mib(need)} and its disk has {_mib(free)} free: free some, choose "
            "another folder, or set guidance.keep_gb"
        )


def space_missing(run_dir: Path, sizes: SaveSizes, run: Any) -> int:
    """Bytes a run still has to find on its disk: its estimate, less what it has written already."""
    return max(0, sizes.of_run(run) - sum(size_of(run_dir / name) for name in (STATES, CHECKPOINT, BEST)))


class Saves:
    """The saves of one run; ``failed`` counts those that did not succeed in this process. tell: called with a sentence
    at the first failure of each kind, and at the first one after a success."""

    def __init__(self, run_dir: Path, sizes: SaveSizes, tell: Callable[[str], None] = lambda _: None) -> None:
        self.run_dir, self.sizes, self._tell = run_dir, sizes, tell
        self.failed = 0
        self._warned: set[str] = set()
        sweep_files(run_dir)
        for left_over in (run_dir / STATES).glob(".step-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        for name in (CHECKPOINT, BEST):
            recover_dir(run_dir / name)

    def state(self, write: Callable[[], object]) -> bool:
        """Whether ``write`` saved a state."""
        return self._attempt("a state", STATES, self.sizes.state, write)

    def checkpoint(self, write: Callable[[Path], object]) -> bool:
        """Whether ``write(folder)`` saved the policy."""
        return self._attempt("the policy", CHECKPOINT, self.sizes.policy, lambda: write(self.run_dir / CHECKPOINT))

    def best(self, step: int, rate: float, n: int, write: Callable[[Path, dict[str, Any]], object]) -> None:
        """Saves the policy after ``step`` steps by ``write(folder, facts)`` if its pass rate exceeds the best so far.

        A tie keeps the earlier one. A resumed run meets its own later best again: the same step ties with itself.
        """
        best = self.best_facts()
        if best is None or rate > best["pass_rate"] or (rate == best["pass_rate"] and step < best["step"]):
            facts = {"step": step, "pass_rate": rate, "n": n}
            target = self.run_dir / BEST
            self._attempt("the best policy so far", BEST, self.sizes.policy, lambda: write(target, facts))

    def best_facts(self) -> dict[str, Any] | None:
        """{"step", "pass_rate", "n"} of the policy in checkpoint-best; None where there is none."""
        try:
            facts: dict[str, Any] = json.loads((self.run_dir / BEST / BEST_FACTS).read_text(encoding="utf-8"))
            return facts
        except (OSError, ValueError):
            return None

    def sum_up(self) -> None:
        """At the end of a run: says again what was not saved, since the first warning is hours old by now."""
        if self.failed:
            states = sorted((self.run_dir / STATES).glob("step-*"))
            left = f"its last state is {states[-1]}" if states else "it has no state, so no steps can be added to it"
            sentence = f"{self.failed} saves of {self.run_dir} failed, {left}: is the disk full?"
            warn(sentence)
            self._tell(sentence)

    def _attempt(self, what: str, name: str, need: int, write: Callable[[], object]) -> bool:
        try:
            if (free := free_bytes(self.run_dir)) < need:
                raise StorageError(f"{self.run_dir / name} needs {_mib(need)} and its disk has {_mib(free)} free")
            write()
        except StorageError as error:
            self.failed += 1
            if what not in self._warned:
                self._warned.add(what)
                sentence = f"{what} was not saved, the run goes on and tries again when the next is due: {error}"
                warn(sentence)
                self._tell(sentence)
            return False
        self._warned.discard(what)
        return True


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB" if count < 10 * 2**30 else f"{count / 2**30:.0f} GiB"
