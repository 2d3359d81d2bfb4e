import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracefp4.errors import TracefpError
from tracefp4.tasks import Prompt, make_task
from tracefp4.tasks.running_sums import MAX_STEP, TEST_POOL, WARMSTART_FIRST_STEP, RunningSumsConfig

LONG = {"min_terms": 4, "max_terms": 6, "min_digits": 2, "max_digits": 2, "free_letters": 0}
TASK = make_task(RunningSumsConfig(**LONG))
PROMPT = Prompt("x", "14+27-5=", "36")
PINNED_TEST = ["37-12-27+29+65=", "30-87-88+87+79="]


def _texts(prompts):
    return [prompt.text for prompt in prompts]


@settings(max_examples=30, deadline=None)
@given(step=st.integers(0, MAX_STEP - 1), seed=st.integers(0, 2**31 - 1), n=st.integers(1, 48))
def test_train_is_deterministic_distinct_and_disjoint_from_test(step, seed, n):
    config = RunningSumsConfig(seed=seed)
    prompts = make_task(config).train_prompts(step, n)
    assert prompts == make_task(config).train_prompts(step, n)
    assert len(set(_texts(prompts))) == len({prompt.id for prompt in prompts}) == n
    assert not set(_texts(prompts)) & set(_texts(TASK.test_prompts(TEST_POOL)))


@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, MAX_STEP - 1), n=st.integers(2, 40))
def test_fewer_prompts_are_a_prefix_of_more(step, n):
    assert TASK.train_prompts(step, n - 1) == TASK.train_prompts(step, n)[: n - 1]


def test_deduplication_works_where_collisions_are_certain():
    # 2 terms of 2 digits: 16200 expressions, of which the test pool takes a quarter.
    small = make_task(RunningSumsConfig(min_terms=2, max_terms=2))
    test = set(_texts(small.test_prompts(TEST_POOL)))
    train = _texts(small.train_prompts(0, 4000))
    assert len(test) == TEST_POOL
    assert len(set(train)) == 4000
    assert not set(train) & test


def test_too_small_a_space_is_refused():
    tiny = make_task(RunningSumsConfig(min_terms=2, max_terms=2, min_digits=1, max_digits=1))
    with pytest.raises(TracefpError, match=r"raise task\.max_terms or task\.max_digits"):
        tiny.train_prompts(0, 8)


def test_steps_seeds_and_the_warm_start_see_different_problems():
    streams = [
        TASK.train_prompts(0, 64),
        TASK.train_prompts(1, 64),
        TASK.train_prompts(WARMSTART_FIRST_STEP, 64),
    ]
    streams.append(make_task(RunningSumsConfig(seed=1)).train_prompts(0, 64))
    assert len({text for prompts in streams for text in _texts(prompts)}) == 4 * 64


def test_test_set_ignores_the_seed_and_is_pinned():
    assert TASK.test_prompts(64) == make_task(RunningSumsConfig(**LONG, seed=9)).test_prompts(64)
    assert TASK.test_prompts(2) == TASK.test_prompts(3)[:2]
    assert _texts(TASK.test_prompts(2)) == PINNED_TEST


@pytest.mark.parametrize(("step", "n"), [(-1, 1), (MAX_STEP, 1), (0, 0), (0, 2**16 + 1)])
def test_train_prompts_refuses(step, n):
    with pytest.raises(TracefpError, match="must lie in"):
        TASK.train_prompts(step, n)


@pytest.mark.parametrize("n", [0, TEST_POOL + 1])
def test_test_prompts_refuses(n):
    with pytest.raises(TracefpError, match="must lie in"):
        TASK.test_prompts(n)


def test_solution_is_written_step_by_step():
    assert TASK.solution(PROMPT) == "14+27=41;41-5=36;#36"
    assert TASK.solution(Prompt("x", "10-27+5=", "-12")) == "10-27=-17;-17+5=-12;#-12"


def test_a_flawed_solution_follows_its_slip_to_a_wrong_answer():
    for prompt in TASK.train_prompts(7, 100):
        flawed, right = TASK.flawed_solution(prompt), TASK.solution(prompt)
        assert TASK.score(prompt, flawed) == 0.0
        assert flawed == TASK.flawed_solution(prompt)
        off = [step for step in flawed.split(";")[:-1] if eval(step.split("=")[0]) != int(step.split("=")[1])]
        assert len(off) == 1
        assert flawed.count(";") == right.count(";")


def test_careless_solutions_have_letters_of_their_own():
    task = make_task(RunningSumsConfig(**{**LONG, "free_letters": 3, "careless_letters": 2}))
    plain = make_task(RunningSumsConfig(**{**LONG, "free_letters": 3}))
    seen: set[str] = set()
    for prompt in task.train_prompts(5, 50):
        assert task.solution(prompt) == plain.solution(prompt)
        flawed = task.flawed_solution(prompt)
        assert task.score(prompt, flawed) == 0.0
        assert [c for c in flawed if not c.isalpha()] == [c for c in plain.flawed_solution(prompt) if not c.isalpha()]
        seen |= {c for c in flawed if c.isalpha()}
    assert seen == set("de")


@pytest.mark.parametrize("letters", [0, 4])
def test_solutions_score_and_never_exceed_eighty_characters(letters):
    task = make_task(RunningSumsConfig(**{**LONG, "free_letters": letters}))
    for prompt in task.train_prompts(5, 200):
        solution = task.solution(prompt)
        assert task.score(prompt, solution) == 1.0
        assert 20 <= len(solution) <= 80
        assert solution == task.solution(prompt)
        assert not set(solution) & set("abcdefgh"[letters:])
        assert sum(c.isalpha() for c in solution) == (solution.count(";") if letters else 0)


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("14+27=41;41-5=36;#36", 1.0),
        ("#36", 1.0),
        ("#35#36", 1.0),
        ("#36<eos>", 1.0),
        ("#36<eos>99", 1.0),
        ("#036", 1.0),
        ("#+36", 1.0),
        ("14+27=41;41-5=36;", 0.0),
        ("36", 0.0),
        ("#36#35", 0.0),
        ("#36#", 0.0),
        ("#36;", 0.0),
        ("#36=36", 0.0),
        ("#=36", 0.0),
        ("#-36", 0.0),
        ("#3", 0.0),
        ("#336", 0.0),
        ("<eos>#36", 0.0),
        ("#", 0.0),
        ("", 0.0),
        ("#nan", 0.0),
        ("#" + "9" * 5000, 0.0),
        ("\x00\n é#", 0.0),
    ],
)
def test_score(response, expected):
    assert TASK.score(PROMPT, response) == expected


@settings(deadline=None)
@given(st.text(max_size=60))
def test_score_never_raises_and_is_zero_or_one(text):
    assert TASK.score(PROMPT, text) in (0.0, 1.0)
