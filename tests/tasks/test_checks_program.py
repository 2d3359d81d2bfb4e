"""The kind program: tests from a data set, programs from a policy. Containment is in test_sandbox.py."""

import json
import threading
import time

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks import CheckConfig, make_check
from tracefp4.tasks.checks.program import parse_tests, program_in, same_output
from tracefp4.tasks.sandbox import SandboxSupport, run

FENCE = "```"


def block(code, language="python"):
    return f"{FENCE}{language}\n{code}\n{FENCE}"


def run_check(responses, tests=None, answer="", entry_point=None, **config):
    metadata = {} if tests is None else {"tests": tests}
    if entry_point:
        metadata["entry_point"] = entry_point
    with make_check(CheckConfig(kind="program", **config)) as check:
        scores = check.score_batch([Prompt(f"p{i}", "", answer, metadata) for i in range(len(responses))], responses)
        return scores, check.metrics()


# What is read


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("x = 1", "x = 1"),
        (f"text\n{block('x = 1')}\nmore", "x = 1\n"),
        (f"{block('x = 1')}\n{block('x = 2', 'py')}\n{block('out', '')}", "x = 2\n"),
        (f"{block('ls', 'sh')}\n{block('x = 1', '')}", "x = 1\n"),
        (f"{block('x = 1')}\n{FENCE}python\nx = 2", "x = 2"),
        (f"{FENCE}Python\nx\n{FENCE}", "x\n"),
        (f"  {FENCE}python title=a\nx\n  {FENCE}", "x\n"),
        ("", ""),
    ],
)
def test_program_in(response, expected):
    assert program_in(response) == expected


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [("1\n", "1", True), ("1 \n2\n\n", "1\n2\n", True), ("1\n\n2", "1\n2", False), (" 1", "1", False), ("", "", True)],
)
def test_same_output(written, expected, same):
    assert same_output(written, expected) is same


def test_tests_are_read_in_every_form():
    cases = [{"input": "1", "output": "2"}]
    assert parse_tests(cases) == parse_tests(json.dumps(cases)) == parse_tests(cases[0])
    assert parse_tests("assert f(1)").code == parse_tests(["assert f(1)"]).code == ("assert f(1)",)
    assert parse_tests("[f(1)]").code == ("[f(1)]",)
    assert parse_tests('["assert f(1)", "assert f(2)"]').code == ("assert f(1)", "assert f(2)")
    assert parse_tests("def check(c):\n    assert c", "f").code[0].endswith("check(f)\n")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([], "expected a list of input and output cases"),
        ("", "test 0 is empty"),
        ("[]", "expected a list"),
        (7, "expected a list"),
        ([{"input": "1"}], "case 0 needs the text 'output', got None"),
        ([{"input": 1, "output": "1"}], "case 0 needs the text 'input', got 1"),
        (["assert f(", "x"], "test 0 is no Python"),
        ([{"input": "", "output": ""}, "x"], "holds either"),
    ],
)
def test_unusable_tests_name_their_problem(isolated, tests, message):
    with make_check(CheckConfig(kind="program")) as check:
        with pytest.raises(TracefpError, match=f"tests of problem train-3 .*{message}") as caught:
            check.validate([Prompt("train-3", "", "", {"tests": tests})])
        assert "\n" not in str(caught.value)


def test_a_missing_field_names_its_problem(isolated):
    with (
        make_check(CheckConfig(kind="program", tests="cases")) as check,
        pytest.raises(TracefpError, match="problem p has no field 'cases' for its tests"),
    ):
        check.validate([Prompt("p", "", "")])


# What is scored


def test_input_and_output_cases(isolated):
    cases = json.dumps([{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6"}])
    responses = [block("print(int(input()) * 2)"), block("print(4)"), block("print(int(input()) * 2); 1 / 0"), "no"]
    assert run_check(responses, answer=cases)[0] == [1.0, 0.0, 0.0, 0.0]
    scores, metrics = run_check(responses, answer=cases, partial_credit=True)
    assert scores == [1.0, 0.5, 0.0, 0.0]
    assert metrics == {"check/timeouts": 0.0, "check/errors": 4.0, "check/limits": 0.0}


def test_test_code(isolated):
    tests = ["assert f(1) == 1", "assert f(2) == 4", "assert f(3) == 9"]
    responses = [
        block("def f(x):\n    return x * x"),
        block("def f(x):\n    return 1"),
        block("import os; os._exit(0)"),
    ]
    assert run_check(responses, tests)[0] == [1.0, 0.0, 0.0]
    assert run_check(responses, tests, partial_credit=True)[0] == [1.0, pytest.approx(1 / 3), 0.0]
    check = "def check(candidate):\n    assert candidate(2) == 4"
    assert run_check(responses, check, entry_point="f")[0] == [1.0, 0.0, 0.0]


def test_runs_that_meet_a_limit_are_counted(isolated):
    cases = json.dumps([{"input": "", "output": "1"}])
    responses = ["print(1)", "while True: pass", "x = bytearray(10 << 30)", "while True: print('y' * 10000)"]
    scores, metrics = run_check(responses, answer=cases, timeout=1, output_kb=64)
    assert scores == [1.0, 0.0, 0.0, 0.0]
    assert metrics == {"check/timeouts": 1.0, "check/errors": 0.0, "check/limits": 2.0}


def test_order_holds_with_many_workers(isolated):
    cases = json.dumps([{"input": "", "output": "1"}])
    responses = [f"import time; time.sleep({(7 - i) / 100}); print({i % 2})" for i in range(8)]
    assert run_check(responses, answer=cases, workers=4)[0] == [0.0, 1.0] * 4


def test_no_start_without_isolation(monkeypatch):
    monkeypatch.setattr(run, "sandbox_support", lambda: SandboxSupport(("net namespace",)))
    with pytest.raises(TracefpError, match=r'lacks: net namespace; .* check.isolation = "weak"'):
        make_check(CheckConfig(kind="program"))


def test_a_close_does_not_wait_for_programs_that_run(isolated):
    check = make_check(CheckConfig(kind="program", timeout=60))
    scores = []
    prompt = Prompt("p", "", json.dumps([{"input": "", "output": ""}]))
    thread = threading.Thread(target=lambda: scores.extend(check.score_batch([prompt], ["while True: pass"])))
    thread.start()
    time.sleep(0.3)
    start = time.monotonic()
    check.close()
    thread.join()
    assert time.monotonic() - start < 5
    assert scores in ([], [0.0])
    with pytest.raises(TracefpError, match="closed"):
        check.score_batch([prompt], ["1"])
