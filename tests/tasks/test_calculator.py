import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracefp4.errors import TracefpError
from tracefp4.tasks import SolvedTask, Task, ToolTask, make_task
from tracefp4.tasks.calculator import Calculator, CalculatorConfig, ExpressionError, evaluate

TASK = Calculator(CalculatorConfig())
PROMPT = TASK.train_prompts(0, 1)[0]


def test_contracts() -> None:
    assert isinstance(make_task(CalculatorConfig()), Task)
    assert isinstance(TASK, ToolTask)
    assert isinstance(TASK, SolvedTask)


def test_problems_are_distinct_repeatable_and_kept_apart() -> None:
    streams = [
        TASK.train_prompts(0, 64),
        TASK.train_prompts(1, 64),
        Calculator(CalculatorConfig(seed=1)).train_prompts(0, 64),
    ]
    assert len({p.text for prompts in streams for p in prompts}) == 3 * 64
    assert streams[1] == Calculator(CalculatorConfig()).train_prompts(1, 64)
    assert TASK.test_prompts(64) == Calculator(CalculatorConfig(seed=1)).test_prompts(64)
    assert not {p.text for p in TASK.test_prompts(4096)} & {p.text for p in streams[0]}
    for p in streams[0]:
        assert p.answer == str(eval(p.metadata["expression"]))
        assert TASK.score(p, TASK.solution(p)) == 1.0


def test_an_exchange() -> None:
    first = f"I compute. <calc>{PROMPT.metadata['expression']}</calc>\n"
    reply = TASK.respond(PROMPT, [first])
    assert reply == f"<result>{PROMPT.answer}</result>"
    last = f"#### {PROMPT.answer}"
    assert TASK.respond(PROMPT, [first, last]) is None
    assert TASK.score(PROMPT, first + reply + last) == 1.0
    assert TASK.score(PROMPT, first + reply) == 0.0


@pytest.mark.parametrize(
    ("turn", "reply"),
    [
        ("<calc>12*34</calc>", "<result>408</result>"),
        ("<calc>1</calc> or <calc>2</calc>", "<result>2</result>"),
        ("<calc> 7 // 2 + 7 % 2 - -1 </calc>", "<result>5</result>"),
        ("<calc>(2+3)*4**2/8</calc>", "<result>10</result>"),
        ("<calc>7/2</calc>", "<result>error: the division leaves a rest; use // and %</result>"),
        ("<calc>1/0</calc>", "<result>error: division by zero</result>"),
        ("<calc>1%0</calc>", "<result>error: division by zero</result>"),
        ("<calc>9**9**9</calc>", "<result>error: exponents from 0 to 64 only</result>"),
        ("<calc>99999999999**60</calc>", "<result>error: the value is too large</result>"),
        ("<calc>2**-1</calc>", "<result>error: exponents from 0 to 64 only</result>"),
        ("<calc>1.5+1</calc>", "<result>error: only whole numbers</result>"),
        ("<calc>True+1</calc>", "<result>error: only whole numbers</result>"),
        ("<calc>__import__('os')</calc>", "<result>error: only numbers, + - * / // % ** and brackets</result>"),
        ("<calc>1<<9</calc>", "<result>error: only numbers, + - * / // % ** and brackets</result>"),
        ("<calc></calc>", "<result>error: not an expression</result>"),
        ("<calc>1+</calc>", "<result>error: not an expression</result>"),
        ("<calc>\x00</calc>", "<result>error: not an expression</result>"),
        ("<calc>" + "(" * 199 + "</calc>", "<result>error: not an expression</result>"),
        ("<calc>" + "1+" * 200 + "1</calc>", "<result>error: longer than 200 characters</result>"),
        ("<calc>1+1</calc> so it is 2", None),
        ("<calc>1+1", None),
        ("1+1</calc>", None),
        ("", None),
    ],
)
def test_replies(turn: str, reply: str | None) -> None:
    assert TASK.respond(PROMPT, [turn]) == reply


def test_the_last_turn_gets_no_reply() -> None:
    task = Calculator(CalculatorConfig(max_turns=2))
    assert task.respond(PROMPT, ["<calc>1</calc>"]) == "<result>1</result>"
    assert task.respond(PROMPT, ["<calc>1</calc>", "<calc>1</calc>"]) is None


@given(st.text(alphabet="0123456789+-*/%() ._eEjxn'\"[]<>=,", max_size=220))
def test_whatever_is_written_is_answered_at_once(text: str) -> None:
    started = time.perf_counter()
    with suppress(ExpressionError):
        assert isinstance(evaluate(text), int)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [("#### 1,234", 1.0), ("#### +1234", 1.0), ("####1234\nok", 1.0), ("1234", 0.0), ("#### 1234.", 0.0)],
)
def test_score(text: str, reward: float) -> None:
    from tracefp4.tasks import Prompt

    assert TASK.score(Prompt("x", "?", "1234"), text) == reward


def test_small_spaces_and_ranges_are_refused() -> None:
    tiny = Calculator(CalculatorConfig(max_terms=2, min_digits=1, max_digits=1))
    assert len(tiny.test_prompts(1)) >= 1
    with pytest.raises(TracefpError, match=r"raise task\.max_terms or task\.max_digits"):
        tiny.train_prompts(0, 300)
    with pytest.raises(TracefpError, match="held-out pool"):
        TASK.test_prompts(4097)
    with pytest.raises(TracefpError, match="step must lie in"):
        TASK.train_prompts(-1, 1)


@pytest.mark.parametrize("max_turns", [1, 2, 4, 7])
def test_solutions_of_several_turns(max_turns: int) -> None:
    task = Calculator(CalculatorConfig(min_terms=2, max_terms=6, max_digits=3, max_turns=max_turns))
    for prompt in task.train_prompts(0, 32):
        for flawed in (False, True):
            turns = task.solution_turns(prompt, flawed)
            assert len(turns) <= max_turns
            for count in range(1, len(turns)):
                reply = task.respond(prompt, turns[:count])
                assert reply is not None
                assert "error" not in reply
            assert task.respond(prompt, turns) is None
            assert task.score(prompt, turns[-1]) == float(not flawed)
