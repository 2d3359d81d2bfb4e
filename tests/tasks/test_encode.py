"""Prompts and replies as token ids, with and without a chat template."""

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import Prompt, PromptEncoder, build_text_tokenizer, build_tokenizer
from tracefp4.tasks.tokenizer import CHAT_TEMPLATE

PLAIN, CHAT = build_text_tokenizer(), build_text_tokenizer(CHAT_TEMPLATE)
TEXT = Prompt("p", "1+1?", "2")
TALK = Prompt(
    "p",
    "Be brief.\n\n1+1?",
    "2",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}),
)
EOS = 1


def encoder(template: str | None, limit: int = 500, **settings: str) -> PromptEncoder:
    return PromptEncoder(build_text_tokenizer(template), limit, **settings)  # type: ignore[arg-type]


def test_plain_text_is_taken_as_it_is() -> None:
    for chosen in ("auto", "off"):
        ids = encoder(None, chat=chosen).encode(TALK)
        assert PLAIN.decode(ids) == TALK.text
    assert PLAIN.decode(encoder(CHAT_TEMPLATE, chat="off").encode(TALK)) == TALK.text


def test_a_template_is_used_where_there_is_one() -> None:
    made = encoder(CHAT_TEMPLATE)
    assert CHAT.decode(made.encode(TEXT)) == "[user] 1+1?<eos>\n[assistant] "
    ids = made.encode(TALK)
    assert CHAT.decode(ids) == "[system] Be brief.<eos>\n[user] 1+1?<eos>\n[assistant] "
    assert ids.count(EOS) == 2
    reference = CHAT.apply_chat_template(list(TALK.messages), add_generation_prompt=True, return_dict=False)
    assert list(ids) == reference


def test_overlong_prompts() -> None:
    dropping = encoder(None, 4)
    assert dropping.encode(TEXT) is not None
    assert dropping.encode(TALK) is None
    assert (dropping.dropped, dropping.truncated) == (1, 0)
    cutting = encoder(None, 4, overlong="truncate")
    assert PLAIN.decode(cutting.encode(TALK)) == "1+1?"
    assert (cutting.dropped, cutting.truncated) == (0, 1)
    with pytest.raises(TracefpError, match=r"problem p has 15 prompt tokens, above sampling\.max_prompt_tokens 4; "):
        encoder(None, 4, overlong="error").encode(TALK)
    with pytest.raises(TracefpError, match=r'sampling\.overlong_prompts = "truncate" is for plain text'):
        encoder(CHAT_TEMPLATE, 4, overlong="truncate")


def test_a_template_is_required_by_on() -> None:
    with pytest.raises(TracefpError, match=r'no chat template, which sampling\.chat_template = "on" requires'):
        encoder(None, chat="on")


def test_what_the_tokenizer_cannot_write_is_named() -> None:
    with pytest.raises(TracefpError, match=r"cannot write the character 'é' of problem p: "):
        encoder(None).encode(Prompt("p", "caf\u00e9", ""))
    with pytest.raises(TracefpError, match=r"cannot write the character ' ' of problem p"):
        PromptEncoder(build_tokenizer(), 9).encode(Prompt("p", "1 + 1", ""))
    with pytest.raises(TracefpError, match=r"turns problem p into nothing"):
        encoder(None).encode(Prompt("p", "", ""))


def test_a_refusing_template_is_one_sentence() -> None:
    no_system = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        + CHAT_TEMPLATE
    )
    made = encoder(no_system)
    assert made.encode(TEXT)
    with pytest.raises(TracefpError, match=r"refuses problem p \(messages: system, user\): System role not supported$"):
        made.encode(TALK)


def test_a_reply_in_plain_text() -> None:
    made = encoder(None)
    assert PLAIN.decode(made.continuation(TEXT, ["<calc>1</calc>"], "<result>1</result>")) == "<result>1</result>"
    with pytest.raises(ValueError, match="no turn"):
        made.continuation(TEXT, [], "x")


@pytest.mark.parametrize("prompt", [TEXT, TALK])
def test_a_reply_under_a_template_equals_the_whole_conversation(prompt: Prompt) -> None:
    made = encoder(CHAT_TEMPLATE)
    turn, reply = "<calc>1</calc>", "<result>1</result>"
    head, sampled = made.encode(prompt), [*CHAT(turn, add_special_tokens=False)["input_ids"], EOS]
    appended = [*head, *sampled, *made.continuation(prompt, [turn], reply)]
    messages = list(prompt.messages or [{"role": "user", "content": prompt.text}])
    messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": reply}]
    assert appended == CHAT.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    # A turn that a stop string ended has no end of sequence yet: the template's is then appended.
    open_ended = made.continuation(prompt, [turn], reply, ended_by_eos=False)
    assert [*head, *sampled[:-1], *open_ended] == appended


def test_a_second_reply_is_like_the_first() -> None:
    made = encoder(CHAT_TEMPLATE)
    assert made.continuation(TEXT, ["a"], "x") == made.continuation(TEXT, ["a", "b"], "x")


@pytest.mark.parametrize("refusal", ["{{ raise_exception('unknown role') }}", ""])
def test_a_template_without_tools_gets_a_user_message(refusal: str) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'tool' %}" + refusal + "{% else %}"
        "[{{ message.role }}] {{ message.content }}{{ eos_token }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    ids = encoder(template).continuation(TEXT, ["a"], "<result>1</result>")
    assert CHAT.decode(ids) == "\n[user] <result>1</result><eos>\n[assistant] "


def test_a_template_that_rewrites_turns_is_refused() -> None:
    rewriting = CHAT_TEMPLATE.replace(
        "{{ message.content }}", "{{ 'Q' if message.role == 'assistant' else message.content }}"
    )
    thinking = CHAT_TEMPLATE.replace("[assistant] {% endif %}", "[assistant] <think>{% endif %}")
    for template in (rewriting, thinking):
        with pytest.raises(
            TracefpError, match=r'otherwise than after the generation prompt.*sampling\.chat_template = "off"'
        ):
            encoder(template).continuation(TEXT, ["a"], "x")
