"""The kinds that run in worker processes: math, regex, python."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.checks import CheckConfig, make_check

REWARDS = """
import os, subprocess, sys, time
from helper import bonus

def score(prompt, response):
    print("a line on standard output")
    os.write(1, b"raw bytes\\n")
    if response == "raise":
        raise ValueError("not\\n good")
    if response == "deep":
        return int("x")
    if response == "helper":
        return bonus(None)
    if response == "exit":
        sys.exit(0)
    if response == "hang":
        while True: pass
    if response == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60) # tracefp4-test-child"])
        time.sleep(60)
    if response == "die":
        os._exit(3)
    if response == "pid":
        return os.getpid()
    if response == "slow":
        time.sleep(.1)
    odd = {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "1", "list": [1], "complex": 1j}
    if response in odd:
        return odd[response]
    if response == "numpy":
        import numpy
        return numpy.float32(.5)
    if response == "numpy bool":
        import numpy
        return numpy.bool_(True)
    assert (prompt["metadata"], prompt["id"][0], prompt["text"]) == ({"k": 1}, "p", "t")
    return response == prompt["answer"]

def positional(a, b):
    return 1

other = 3
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARDS)
    (path.parent / "helper.py").write_text("def bonus(x):\n    return x + 1\n")
    return path


@pytest.fixture(scope="module")
def strict_check(rewards):
    with make_check(python(rewards, timeout=0.5)) as check:
        yield check


def prompts(n, answer="1"):
    return [Prompt(f"p{i}", "t", answer, {"k": 1}) for i in range(n)]


def run(config, responses, answer="1"):
    with make_check(config) as check:
        return check.score_batch(prompts(len(responses), answer), responses), check.metrics()


def python(rewards, name="score", **config):
    return CheckConfig(kind="python", function=f"{rewards}:{name}", workers=2, **config)


def children():
    found = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "tracefp4-test-child" in line]


# Kind python


def test_a_function_scores_in_order_and_prints_go_to_standard_error(rewards, capfd):
    scores, metrics = run(python(rewards), ["slow", "1", "2", "numpy", "1", "numpy bool"])
    assert scores == [0.0, 1.0, 0.0, 0.5, 1.0, 1.0]
    assert metrics == {"check/timeouts": 0.0, "check/errors": 0.0}
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("a line on standard output") == err.count("raw bytes") == 6


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ("raise", r"raised ValueError: not good \(my_rewards.py, line 9\)"),
        ("deep", r"raised ValueError: invalid literal .* \(my_rewards.py, line 11\)"),
        ("helper", r"raised TypeError: unsupported .* \(my_rewards.py, line 13\)"),
        ("exit", r"raised SystemExit: 0 \(my_rewards.py, line 15\)"),
        ("hang", r"did not return within 0.5 s \(check.timeout\)"),
        ("die", "ended its process with exit code 3"),
        ("nan", "returned nan, which is no finite number,"),
        ("inf", "returned inf, which is no finite number,"),
        ("none", "returned None, which is no finite number,"),
        ("text", "returned str '1', which is no finite number,"),
        ("list", r"returned list \[1\], which is no finite number,"),
        ("complex", "returned complex 1j, which is no finite number,"),
    ],
)
def test_a_broken_function_stops_the_run_in_one_sentence(strict_check, response, problem):
    with pytest.raises(TracefpError, match=f"my_rewards.py:score {problem} on problem p2$") as caught:
        strict_check.score_batch(prompts(4), ["1", "2", response, "1"])
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_lowest_problem_is_named_whichever_fails_first(strict_check):
    with pytest.raises(TracefpError, match=r"did not return .* on problem p1$"):
        strict_check.score_batch(prompts(4), ["1", "hang", "raise", "raise"])
    assert strict_check.score_batch(prompts(2), ["1", "2"]) == [1.0, 0.0]  # it goes on after an error


def test_a_stop_comes_before_the_rest_of_the_batch(strict_check):
    start = time.monotonic()
    with pytest.raises(TracefpError, match="did not return"):
        strict_check.score_batch(prompts(40), ["hang"] * 40)
    assert time.monotonic() - start < 8  # 20 s where all of them ran


def test_errors_can_score_zero_and_are_counted(rewards):
    with make_check(python(rewards, timeout=0.5, on_error="zero")) as check:
        responses = ["1", "raise", "hang", "none", "die", "1"]
        assert check.score_batch(prompts(6), responses) == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert check.metrics() == {"check/timeouts": 1.0, "check/errors": 3.0}
        assert check.metrics() == {"check/timeouts": 0.0, "check/errors": 0.0}
        assert check.counts == {"timeouts": 1, "errors": 3}


def test_workers_are_reused_and_what_a_hanging_call_started_dies_with_it(rewards):
    with make_check(python(rewards, timeout=0.5, on_error="zero")) as check:
        pids = set(check.score_batch(prompts(8), ["pid"] * 8))
        pids |= set(check.score_batch(prompts(8), ["pid"] * 8))
        assert 1 <= len(pids) <= 2
        assert os.getpid() not in pids
        check.score_batch(prompts(1), ["child"])
        time.sleep(0.1)
        assert children() == []
    with pytest.raises(TracefpError, match="closed"):
        check.score_batch(prompts(1), ["1"])
    for pid in pids:
        assert not Path(f"/proc/{int(pid)}").exists()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("{0}:scor", "there is no scor in .*; functions there: bonus, score, positional"),
        ("{0}:other", "it is not callable: other"),
        ("{0}.nowhere.py:f", "file .*nowhere.py does not exist"),
        ("no_such_package.module:f", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("math:nothing", "there is no nothing in math"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_the_start(rewards, function, message):
    with pytest.raises(TracefpError, match=message) as caught:
        make_check(CheckConfig(kind="python", function=function.format(rewards)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise RuntimeError('at import')", r"RuntimeError: at import \(broken.py, line 2\)"),
        ("def f(:\n  pass", r"SyntaxError: .* \(broken.py, line 1\)"),
        ("import os\nos._exit(4)", "ended its process with exit code 4 while it imported"),
        ("import sys\nsys.exit(1)", "SystemExit: 1"),
    ],
)
def test_a_module_that_does_not_import_is_refused_at_the_start(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(TracefpError, match=message):
        make_check(CheckConfig(kind="python", function=f"{tmp_path}/broken.py:f"))


def test_a_wrong_signature_is_an_error_of_the_call(rewards):
    with pytest.raises(TracefpError, match=r"raised TypeError: positional.. got an unexpected keyword argument"):
        run(python(rewards, "positional"), ["1"])


def test_a_function_of_a_module_in_the_working_folder(rewards, monkeypatch):
    monkeypatch.chdir(rewards.parent)
    assert run(CheckConfig(kind="python", function="my_rewards:score"), ["1"])[0] == [1.0]


def test_workers_die_with_the_trainer(rewards):
    script = f"""
from tracefp4.tasks.checks import *
from tracefp4.tasks.base import Prompt
c = make_check(CheckConfig(kind="python", function={str(rewards)!r} + ":score", workers=1))
print(int(c.score_batch([Prompt("p", "t", "")], ["pid"])[0]), flush=True)
c.score_batch([Prompt("p", "t", "")], ["hang"])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    worker = int(process.stdout.readline())
    assert Path(f"/proc/{worker}").exists()
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{worker}").exists()


# Kind regex


def test_regex_matches_whole_or_part():
    config = {"kind": "regex", "workers": 1, "pattern": r"a+b"}
    assert run(CheckConfig(**config), ["aab", "xaab", ""])[0] == [1.0, 0.0, 0.0]
    assert run(CheckConfig(**config, match="search"), ["aab", "xaab", ""])[0] == [1.0, 1.0, 0.0]
    assert run(CheckConfig(**config, extract="answer_tag"), ["<answer>ab</answer>", "ab"])[0] == [1.0, 0.0]


def test_regex_from_the_answer():
    config = CheckConfig(kind="regex", workers=1, extract="last_line")
    assert run(config, ["x\n12", "ab"], answer=r"\d+")[0] == [1.0, 0.0]
    with pytest.raises(TracefpError, match=r"answer of problem p0, '\(', is no regular expression"):
        run(config, ["x"], answer="(")


def test_a_bad_pattern_is_refused_at_the_start():
    with pytest.raises(TracefpError, match=r"check.pattern, 'a\(', is no regular expression: missing \)"):
        make_check(CheckConfig(kind="regex", pattern="a("))


def test_catastrophic_backtracking_scores_zero_and_is_counted():
    config = CheckConfig(kind="regex", pattern="(a+)+b", timeout=0.3, workers=1)
    scores, metrics = run(config, ["a" * 60, "ab", "a" * 60])
    assert scores == [0.0, 1.0, 0.0]
    assert metrics["check/timeouts"] == 2.0


# Kind math


@pytest.fixture(scope="module")
def math_check():
    with make_check(CheckConfig(kind="math", workers=1, timeout=6)) as check:
        yield check


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("42", r"so \boxed{42}.", 1),
        ("42", r"\boxed{41} no, \boxed{42}", 1),
        ("42", r"\boxed{42} no, \boxed{41}", 0),
        ("42", "#### 42", 1),
        ("42", "<answer>42</answer>", 1),
        ("42", "it is 41, no, it is 42", 1),
        ("42", "it is 42, no, it is 41", 0),
        ("42", r"\boxed{}", 0),
        ("42", "", 0),
        ("42", "nothing", 0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1),
        (r"\frac{1}{2}", "#### 1/2", 1),
        ("1/2", r"the answer is $\frac{2}{4}$", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        ("x^2+2x+1", r"\boxed{(x-1)^2}", 0),
        ("$x = 2$", r"\boxed{2}", 1),
        ("#### 1,234", r"\boxed{1234}", 1),
        (r"\boxed{\sqrt{8}}", r"\boxed{2\sqrt{2}}", 1),
        ("(1, 2)", r"\boxed{(1,2)}", 1),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        (r"50\%", r"\boxed{0.5}", 1),
        (r"\text{Monday}", r"\boxed{\text{Monday}}", 1),
        ("42", "\\boxed{" + "(" * 1500 + "}", 0),
        ("42", "\ud800\x00", 0),
    ],
)
def test_math(math_check, answer, response, expected):
    assert math_check.score_batch([Prompt("p", "", answer)], [response]) == [expected]


@pytest.mark.parametrize("answer", ["", "@@!", "?"])
def test_an_answer_that_math_verify_cannot_read_names_its_problem(math_check, answer):
    with pytest.raises(TracefpError, match=r"answer of problem train-7, .* cannot be read by math-verify; mend it"):
        math_check.validate([Prompt("ok", "", "1"), Prompt("train-7", "", answer)])


def test_math_works_outside_the_main_thread(math_check):
    found = []
    thread = threading.Thread(target=lambda: found.extend(math_check.score_batch(prompts(2), [r"\boxed{1}", "2"])))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_a_comparison_that_hangs_is_killed_and_counted():
    config = CheckConfig(kind="math", workers=1, timeout=4)
    scores, metrics = run(config, [r"\boxed{9^{9^{9^{9^9}}}}", r"\boxed{1}"])
    assert scores == [0.0, 1.0]
    assert metrics["check/timeouts"] == 1.0
