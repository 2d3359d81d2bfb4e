"""The exchanges of a multi-turn task while the engine generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tracefp4.tasks.base import Prompt, ToolTask
from tracefp4.tasks.encode import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Exchanges:
    """Answers the policy's turns by the task's environment; an ``OnTurn`` of ``tracefp4.types``.

    prompts: the problem of every request id. turns: the policy's turns so far as text, by request id; a turn that was
    cut off is not among them.
    """

    def __init__(
        self,
        task: ToolTask,
        encoder: PromptEncoder,
        tokenizer: PreTrainedTokenizerBase,
        prompts: Mapping[str, Prompt],
    ) -> None:
        self.task, self.encoder, self.tokenizer, self.prompts = task, encoder, tokenizer, prompts
        self.turns: dict[str, list[str]] = {}

    def __call__(self, request_id: str, turn: tuple[int, ...]) -> tuple[int, ...] | None:
        """Token ids to append after ``turn``, or None where the exchange is over."""
        prompt, turns = self.prompts[request_id], self.turns.setdefault(request_id, [])
        turns.append(str(self.tokenizer.decode(list(turn), skip_special_tokens=True)))
        reply = self.task.respond(prompt, turns)
        if reply is None:
            return None
        return self.encoder.continuation(prompt, turns, reply, turn[-1] == self.tokenizer.eos_token_id)

    def last_turn(self, request_id: str) -> str:
        """Text of the last turn that ended by itself: what is scored, so that no tool's words count as an answer."""
        turns = self.turns.get(request_id, [])
        return turns[-1] if turns else ""
