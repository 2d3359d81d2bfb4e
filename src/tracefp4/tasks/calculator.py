"""Arithmetic with a calculator at hand: the smallest multi-turn task.

A turn of the policy that ends in ``<calc>EXPRESSION</calc>`` is answered by ``<result>VALUE</result>``, or by
``<result>error: REASON</result>`` where the expression cannot be computed; any other turn ends the exchange, and so
does the last of ``max_turns``. The answer is the whole number after the last ``#### `` of the response::

    policy       <calc>4831*927</calc>
    environment  <result>4478337</result>
    policy       #### 4478337
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from tracefp4.tasks.base import Prompt, TaskConfig
from tracefp4.tasks.extract import extract_answer
from tracefp4.tasks.generated import check_draw, check_enough, check_ordered, first_of_pool

MAX_EXPRESSION = 200
MAX_BITS = 256
MAX_EXPONENT = 64
TEST_POOL = 4096

INSTRUCTION = (
    "You may end a message with <calc>EXPRESSION</calc>; the reply is its value. Write the final answer after #### ."
)

_CALL = re.compile(r"<calc>((?:(?!<calc>).)*)</calc>\s*\Z", re.DOTALL)


class CalculatorConfig(TaskConfig):
    """min_terms, max_terms: numbers of an expression. min_digits, max_digits: of each number. max_turns: of the
    policy; the last of them gets no reply."""

    name: Literal["calculator"] = "calculator"
    min_terms: int = Field(default=2, ge=2, le=8)
    max_terms: int = Field(default=4, ge=2, le=8)
    min_digits: int = Field(default=2, ge=1, le=9)
    max_digits: int = Field(default=5, ge=1, le=9)
    max_turns: int = Field(default=4, ge=1, le=64)

    @model_validator(mode="after")
    def _ranges_are_ordered(self) -> Self:
        check_ordered(self, "terms", "digits")
        return self


class Calculator:
    """The task ``calculator``; see ``tracefp4.tasks.base`` for the contracts Task and ToolTask."""

    def __init__(self, config: CalculatorConfig) -> None:
        self.config = config
        pool = self._distinct("test", "held out", TEST_POOL, frozenset(), at_least=1)
        # A config with few expressions keeps most of them for training.
        self._test = pool if len(pool) == TEST_POOL else pool[: len(pool) // 8]
        self._held_out = frozenset(p.text for p in self._test)

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """``n`` distinct problems, none of them held out; deterministic in (seed, step).

        Raises:
            TracefpError: ``step`` or ``n`` is out of range, or the config admits too few problems.
        """
        check_draw(step, n)
        return self._distinct(f"train-{step}", f"train {self.config.seed} {step}", n, self._held_out, at_least=n)

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` of the held-out pool, independent of the seed.

        Raises:
            TracefpError: ``n`` is below 1 or above the pool's size.
        """
        return first_of_pool(self._test, n)

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        """The value of the expression that the last turn ends with; None where the exchange is over."""
        call = _CALL.search(turns[-1]) if len(turns) < self.config.max_turns else None
        if call is None:
            return None
        try:
            return f"<result>{evaluate(call[1])}</result>"
        except ExpressionError as error:
            return f"<result>error: {error}</result>"

    def score(self, prompt: Prompt, response_text: str) -> float:
        """1.0 iff the whole number after the last ``####`` is the answer; thousands may be set off by commas."""
        answer = extract_answer(response_text, "hashes")
        return float(answer is not None and answer.replace(",", "").removeprefix("+") == prompt.answer)

    def solution(self, prompt: Prompt) -> str:
        """The answer without the calculator: what a policy that needs none would write."""
        return f"#### {prompt.answer}"

    def solution_turns(self, prompt: Prompt, flawed: bool) -> list[str]:
        """The policy's turns: a call for each operation, products first and those in any order, then the answer.

        flawed: a number of one call is misread, and the answer follows from it. Where ``max_turns`` has no room for
        the calls one call holds the whole expression, or there is none.
        """
        chance = Random(f"{flawed} {prompt.text}")
        for _ in range(64):
            turns, value = self._calls(prompt.metadata["expression"].split(), chance, flawed)
            if not flawed or str(value) != prompt.answer:
                break
        return [*turns, f"#### {value}"]

    def _calls(self, terms: list[str], chance: Random, flawed: bool) -> tuple[list[str], int]:
        """(the turns with calls, the last one's value)."""
        room, operations = self.config.max_turns - 1, len(terms) // 2
        whole = operations > room
        slip_at = chance.randrange(1 if whole else operations) if flawed else -1
        if whole:
            expression = self._misread(terms, chance) if flawed else terms
            return ([f"<calc>{''.join(expression)}</calc>"] if room else []), evaluate("".join(expression))
        turns: list[str] = []
        for index in range(operations):
            products = [i for i in range(1, len(terms), 2) if terms[i] == "*"]
            place = chance.choice(products) if products else 1
            part = terms[place - 1 : place + 2]
            part = self._misread(part, chance) if index == slip_at else part
            turns.append(f"<calc>{''.join(part)}</calc>")
            terms = [*terms[: place - 1], str(evaluate("".join(part))), *terms[place + 2 :]]
        return turns, int(terms[0])

    def _misread(self, terms: list[str], chance: Random) -> list[str]:
        place = 2 * chance.randrange((len(terms) + 1) // 2)
        off = str(int(terms[place]) + chance.choice((-10, -1, 1, 10)))
        return [*terms[:place], off, *terms[place + 1 :]]

    def _distinct(self, prefix: str, stream: str, n: int, excluded: frozenset[str], at_least: int) -> list[Prompt]:
        chance = Random(f"calculator {stream}")
        prompts: list[Prompt] = []
        seen = set(excluded)
        for _ in range(16 * n + 1024):
            if len(prompts) == n:
                break
            expression = self._expression(chance)
            text = f"What is {expression}? {INSTRUCTION}"
            if text in seen:
                continue
            seen.add(text)
            answer = str(evaluate(expression))
            prompts.append(Prompt(f"{prefix}-{len(prompts)}", text, answer, {"expression": expression}))
        if len(prompts) < at_least:
            check_enough(prompts, n, "raise task.max_terms or task.max_digits")
        return prompts

    def _expression(self, chance: Random) -> str:
        c = self.config
        parts = []
        for index in range(chance.randint(c.min_terms, c.max_terms)):
            digits = chance.randint(c.min_digits, c.max_digits)
            number = chance.randrange(10 ** (digits - 1), 10**digits)
            parts += [chance.choice("+-*")] * bool(index) + [str(number)]
        return " ".join(parts)


class ExpressionError(ValueError):
    """An expression that the calculator does not compute; the message is for the policy."""


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def evaluate(expression: str) -> int:
    """The value of ``+ - * / // % **`` and brackets over whole numbers; ``/`` must come out even.

    Never runs what it reads, and is bounded: expressions of at most 200 characters, values of at most 256 bits,
    exponents of at most 64.

    Raises:
        ExpressionError: anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ExpressionError(f"longer than {MAX_EXPRESSION} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # the parser warns of "1or 2"
            tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError("not an expression") from None


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            result = number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            result = -_value(inner)
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            result = _value(inner)
        case ast.BinOp(left=left, op=op, right=right):
            result = _binary(op, _value(left), _value(right))
        case ast.Constant():
            raise ExpressionError("only whole numbers")
        case _:
            raise ExpressionError("only numbers, + - * / // % ** and brackets")
    if result.bit_length() > MAX_BITS:
        raise ExpressionError("the value is too large")
    return result


def _binary(op: ast.operator, left: int, right: int) -> int:
    if isinstance(op, ast.Div | ast.FloorDiv | ast.Mod) and right == 0:
        raise ExpressionError("division by zero")
    if isinstance(op, ast.Div):
        quotient, rest = divmod(left, right)
        if rest:
            raise ExpressionError("the division leaves a rest; use // and %")
        return quotient
    if isinstance(op, ast.Pow):
        if not 0 <= right <= MAX_EXPONENT:
            raise ExpressionError(f"exponents from 0 to {MAX_EXPONENT} only")
        if left.bit_length() * right > 2 * MAX_BITS:
            raise ExpressionError("the value is too large")
        return int(left**right)
    if type(op) not in _BINARY:
        raise ExpressionError("only numbers, + - * / // % ** and brackets")
    return _BINARY[type(op)](left, right)
