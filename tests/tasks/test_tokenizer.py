import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tracefp4.tasks.tokenizer import CHARACTERS, CHAT_TEMPLATE, TEXT_CHARACTERS, build_text_tokenizer, build_tokenizer

TOKENIZER = build_tokenizer()


@given(st.text(alphabet=CHARACTERS, max_size=80))
def test_round_trip_one_token_per_character(text):
    ids = TOKENIZER(text).input_ids
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_ids_are_pinned():
    # A checkpoint's embedding rows mean these ids; changing them silently breaks every saved model.
    assert len(TOKENIZER) == 25
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (0, 1)
    assert TOKENIZER("0123456789+-=;#abcdefgh").input_ids == list(range(2, 25))


def test_saved_tokenizer_loads_with_auto_class(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "14+27-5=14+27=41;41-5=36;#36"
    assert loaded(text).input_ids == TOKENIZER(text).input_ids
    assert loaded.decode([*loaded(text).input_ids, 1, 0, 0], skip_special_tokens=True) == text
    assert (loaded.pad_token, loaded.eos_token, loaded.padding_side) == ("<pad>", "<eos>", "left")


@pytest.mark.parametrize("text", ["1 + 2", "x", "1\n", "é"])
def test_foreign_characters_raise(text):
    with pytest.raises(Exception, match="UNK"):
        TOKENIZER(text)


TEXT_TOKENIZER = build_text_tokenizer()


@given(st.text(alphabet=TEXT_CHARACTERS, max_size=80))
def test_text_round_trip_one_token_per_character(text):
    if not any(token in text for token in ("<pad>", "<eos>")):
        ids = TEXT_TOKENIZER(text).input_ids
        assert len(ids) == len(text)
        assert TEXT_TOKENIZER.decode(ids) == text


def test_text_tokenizer_saves_its_template(tmp_path):
    assert len(TEXT_TOKENIZER) == 98
    assert TEXT_TOKENIZER("\n\n ~").input_ids == [2, 2, 3, 97]
    build_text_tokenizer(CHAT_TEMPLATE).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == CHAT_TEMPLATE
    assert loaded("a\n\nb").input_ids == TEXT_TOKENIZER("a\n\nb").input_ids
    assert TEXT_TOKENIZER.chat_template is None
    with pytest.raises(Exception, match="UNK"):
        TEXT_TOKENIZER("é")
