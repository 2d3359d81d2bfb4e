"""Character-level tokenizers in the Hugging Face fast format: one for arithmetic, one for text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
FREE_LETTERS = "abcdefgh"
CHARACTERS = "0123456789+-=;#" + FREE_LETTERS
TEXT_CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""A plain chat template that the text tokenizer can write: a line a message, ended by the end-of-sequence token."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``CHARACTERS``, after ``<pad>`` (id 0) and ``<eos>`` (id 1): 25 in all.

    There is no unknown token: encoding any other character raises, because a prompt that silently lost a
    character would be a different problem with the old answer. Nothing is prepended or appended.
    """
    return _character_tokenizer(CHARACTERS, model_max_length=512)


def build_text_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and the line feed, after ``<pad>`` (0) and ``<eos>`` (1): 98 in all.

    For text tasks on small models. As with ``build_tokenizer``, any other character raises. chat_template: a Jinja
    template, ``CHAT_TEMPLATE`` for example; None leaves a tokenizer without one.
    """
    tokenizer = _character_tokenizer(TEXT_CHARACTERS, model_max_length=4096)
    tokenizer.chat_template = chat_template
    return tokenizer


def _character_tokenizer(characters: str, model_max_length: int) -> PreTrainedTokenizerFast:
    # Imported here: transformers takes seconds, and prompts and verifiers do without it.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *characters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    every = r"[\s\S]" if "\n" in characters else "."  # "." matches no line feed
    core.pre_tokenizer = pre_tokenizers.Split(Regex(every), behavior="isolated")
    core.decoder = decoders.Fuse()  # without it the decoder puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",  # decoding continues from the right edge
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=model_max_length,
    )
