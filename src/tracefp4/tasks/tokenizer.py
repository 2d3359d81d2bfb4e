"""A character-level tokenizer for arithmetic, in the Hugging Face fast format."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
FREE_LETTERS = "abcdefgh"
CHARACTERS = "0123456789+-=;#" + FREE_LETTERS


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``CHARACTERS``, after ``<pad>`` (id 0) and ``<eos>`` (id 1): 25 in all.

    There is no unknown token: encoding any other character raises, because a prompt that silently lost a
    character would be a different problem with the old answer. Nothing is prepended or appended.
    """
    # Imported here: transformers takes seconds, and prompts and verifiers do without it.
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD_TOKEN, EOS_TOKEN, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()  # without it the decoder puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        padding_side="left",  # decoding continues from the right edge
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        model_max_length=512,
    )
