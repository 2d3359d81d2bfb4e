"""From problems to token ids: chat template, length limit, and the environment's turns of a multi-turn task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["drop", "truncate", "error"]

# Stands for the policy's turn in a rendering: printable ASCII, so that any tokenizer can write it, and no word.
_TURN = "zqTURNqz"


class PromptEncoder:
    """Encodes problems for one tokenizer.

    max_prompt_tokens: longest prompt. overlong: what becomes of a longer one; "truncate" keeps its last tokens and is
    for plain text only, since a chat prompt would lose its system message and its markup. chat: "auto" renders the chat
    template where the tokenizer has one, "on" requires one, "off" takes the plain text.

    dropped, truncated: counts over all ``encode`` calls.

    Raises:
        TracefpError: ``chat`` is "on" and there is no template, or prompts are to be truncated under a template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_tokens: int,
        overlong: Overlong = "drop",
        chat: Literal["auto", "on", "off"] = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.max_prompt_tokens, self.overlong = max_prompt_tokens, overlong
        has_template = getattr(tokenizer, "chat_template", None) is not None
        if chat == "on" and not has_template:
            raise TracefpError('the tokenizer has no chat template, which sampling.chat_template = "on" requires')
        self.chat = has_template and chat != "off"
        if self.chat and overlong == "truncate":
            raise TracefpError(
                'sampling.overlong_prompts = "truncate" is for plain text: this tokenizer has a chat template, whose '
                'prompts cannot be cut; use "drop" or "error"'
            )
        self.dropped = self.truncated = 0
        self.shortest_dropped: int | None = None
        self._reply_role = ""

    def encode(self, prompt: Prompt) -> tuple[int, ...] | None:
        """The prompt's token ids, at least one; None where it is longer than allowed and dropped.

        Raises:
            TracefpError: the tokenizer cannot write the prompt, makes nothing of it, or it is too long under "error".
        """
        text = self._render(_messages_of(prompt), True, prompt) if self.chat else prompt.text
        ids = self._ids(text, f"problem {prompt.id}")
        if not ids:
            raise TracefpError(f"the tokenizer turns problem {prompt.id} into nothing; does its folder lack files?")
        if len(ids) <= self.max_prompt_tokens:
            return ids
        if self.overlong == "error":
            raise TracefpError(
                f"problem {prompt.id} has {len(ids)} prompt tokens, above sampling.max_prompt_tokens "
                f"{self.max_prompt_tokens}; raise it (and rollout.max_model_len), or set sampling.overlong_prompts to "
                '"drop"'
            )
        if self.overlong == "truncate":
            self.truncated += 1
            return ids[-self.max_prompt_tokens :]
        self.dropped += 1
        self.shortest_dropped = min(len(ids), self.shortest_dropped or len(ids))
        return None

    def continuation(
        self, prompt: Prompt, turn_texts: Sequence[str], reply: str, ended_by_eos: bool = True
    ) -> tuple[int, ...]:
        """The token ids to append after the policy's last turn: the environment's reply, ready for the next turn.

        With a chat template: what the template renders between the assistant's text and its next turn, the reply as a
        ``tool`` message, or as a ``user`` message where the template does not know tools. Sampled tokens are never
        encoded again. turn_texts: the policy's turns so far. ended_by_eos: the last sampled token was the end of
        sequence, which is then not written twice.

        Raises:
            TracefpError: the template renders a finished turn otherwise than the prompt of the same turn, so that
                appending would not give what the template gives; or the tokenizer cannot write the reply.
        """
        if not turn_texts:
            raise ValueError("there is no turn to go on from")
        text = self._suffix(prompt, reply) if self.chat else reply
        ids = self._ids(text, f"the environment's reply to problem {prompt.id}")
        return ids[1:] if self.chat and ended_by_eos and ids[:1] == (self.tokenizer.eos_token_id,) else ids

    def _suffix(self, prompt: Prompt, reply: str) -> str:
        """What follows the assistant's text, as the difference of two renderings."""
        messages = _messages_of(prompt)
        before = self._render(messages, True, prompt) + _TURN
        turn = {"role": "assistant", "content": _TURN}
        problems = []
        for role in [self._reply_role] if self._reply_role else ["tool", "user"]:
            try:
                after = self._render([*messages, turn, {"role": role, "content": reply}], True, prompt)
            except TracefpError as error:
                problems.append(str(error))
                continue
            if reply.strip() not in after:
                problems.append(f"the chat template leaves out a {role} message")
            elif not after.startswith(before):
                problems.append(
                    f"the chat template renders an assistant's turn before a {role} message otherwise than after the "
                    "generation prompt, so that a reply cannot be appended to sampled tokens"
                )
            else:
                self._reply_role = role
                return after[len(before) :]
        raise TracefpError(f'{problems[-1]}; set sampling.chat_template = "off" or mend the tokenizer\'s template')

    def _render(self, messages: Sequence[Message], generate: bool, prompt: Prompt) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=generate, tokenize=False)
            )
        except Exception as error:  # a template is a program: it may divide by zero
            reason = " ".join(str(error).split())
            roles = ", ".join(message["role"] for message in messages)
            raise TracefpError(
                f"the tokenizer's chat template refuses problem {prompt.id} (messages: {roles}): {reason}"
            ) from None

    def _ids(self, text: str, what: str) -> tuple[int, ...]:
        try:
            return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # the tokenizers library raises plain Exception for a character it does not know
            foreign = self._foreign(text)
            named = f"the character {foreign!r} of {what}" if foreign else what
            raise TracefpError(f"the tokenizer cannot write {named}: {' '.join(str(error).split())}") from error

    def _foreign(self, text: str) -> str:
        """The first character that the tokenizer does not know; '' where each alone is known."""
        for character in dict.fromkeys(text):
            try:
                self.tokenizer(character, add_special_tokens=False)
            except Exception:
                return character
        return ""


def _messages_of(prompt: Prompt) -> list[Message]:
    return list(prompt.messages) if prompt.messages else [{"role": "user", "content": prompt.text}]
