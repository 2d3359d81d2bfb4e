"""The task `reasoning_gym`: families end to end with the library's own scorer, the mixture, and its errors."""

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import Prompt, Task, make_task
from tracefp4.tasks.reasoning import ReasoningGym, ReasoningGymConfig

FAMILIES = {
    "chain_sum": {"min_terms": 2, "max_terms": 3},
    "gcd": {},
    "fraction_simplification": {},
    "simple_equations": {},
    "polynomial_multiplication": {},
    "propositional_logic": {},
    "knights_knaves": {"n_people": 2},
    "countdown": {"min_numbers": 3, "max_numbers": 4},
    "maze": {},
    "tower_of_hanoi": {"max_disks": 7},
    "rotate_matrix": {},
    "shortest_path": {},
    "spell_backward": {},
    "letter_counting": {},
    "word_sorting": {},
    "string_manipulation": {},
    "prime_factorization": {},
    "pool_matrix": {},
}


def config(*families: str, **settings: object) -> ReasoningGymConfig:
    options = {name: FAMILIES[name] for name in families if FAMILIES.get(name)}
    return ReasoningGymConfig(**{"families": list(families), "options": options, "test_size": 16, **settings})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_end_to_end(family: str) -> None:
    task = make_task(config(family))
    assert isinstance(task, Task)
    train, test = task.train_prompts(3, 4), task.test_prompts(16)
    assert train == make_task(config(family)).train_prompts(3, 4)
    assert len({p.text for p in train}) == 4
    assert not {p.text for p in train} & {p.text for p in test}
    for prompt in [*train, *test[:2]]:
        assert prompt.text.endswith("\nEnd with #### and then the final answer alone.")
        if prompt.metadata["reference"] is not None:
            assert task.score(prompt, f"Let me think.\n#### {prompt.answer}") == 1.0
            tagged = ReasoningGym(config(family, answer_format="answer_tag"))
            assert tagged.score(prompt, f"<answer>{prompt.answer}</answer>") == 1.0
        for wrong in ("", "#### ", "#### zzz", "####\n", "#### \x00é", "#### " + "9" * 5000):
            assert task.score(prompt, wrong) == 0.0, wrong


def test_steps_and_seeds_draw_other_problems_and_the_held_out_pool_stays() -> None:
    task, other = ReasoningGym(config("chain_sum", "gcd")), ReasoningGym(config("chain_sum", "gcd", seed=1))
    texts = [frozenset(p.text for p in t.train_prompts(s, 8)) for t, s in ((task, 0), (task, 1), (other, 0))]
    assert len(set(texts)) == 3
    assert task.test_prompts(16) == other.test_prompts(16)
    assert task.test_prompts(3) == task.test_prompts(16)[:3]
    assert task.train_prompts(0, 3) == task.train_prompts(0, 8)[:3]


def test_weights_set_the_shares() -> None:
    task = ReasoningGym(config("chain_sum", "gcd", weights={"chain_sum": 3.0}))
    names = [p.metadata["family"] for p in task.train_prompts(0, 400)]
    assert abs(names.count("chain_sum") / 400 - 0.75) < 4 * (0.75 * 0.25 / 400) ** 0.5  # four standard errors


def test_partial_credit_is_the_librarys() -> None:
    prompt = ReasoningGym(config("countdown")).train_prompts(0, 1)[0]
    part = f"#### {prompt.metadata['item']['numbers'][0]}"  # a number of the game, but not the target
    assert ReasoningGym(config("countdown")).score(prompt, part) == 0.0
    assert 0.0 < ReasoningGym(config("countdown", partial_credit=True)).score(prompt, part) < 1.0


def test_instruction_can_be_changed_or_left_out() -> None:
    boxed = ReasoningGym(config("gcd", answer_format="boxed")).train_prompts(0, 1)[0]
    own = ReasoningGym(config("gcd", instruction="Go.")).train_prompts(0, 1)[0]
    none = ReasoningGym(config("gcd", instruction="")).train_prompts(0, 1)[0]
    assert boxed.text.endswith("Write the final answer within \\boxed{}.")
    assert own.text == none.text.rstrip() + "\nGo."


@pytest.mark.parametrize("answer", ["9**9**9", "9 ^ 9 ^ 9", "(2)**99999999", "99999999!", "factorial(10**9)"])
def test_what_would_never_end_is_not_computed(answer: str) -> None:
    task = ReasoningGym(config("countdown", partial_credit=True))
    assert task.score(task.train_prompts(0, 1)[0], f"#### {answer}") == 0.0


ERRORS = [
    ({"families": ["chain_sums"]}, "task.families: unknown family 'chain_sums'; did you mean chain_sum"),
    ({"families": ["composite"]}, "list its parts in task.families instead"),
    (
        {"families": ["gcd"], "options": {"gcd": {"min_number": 3}}},
        "unknown key task.options.gcd.min_number; did you mean task.options.gcd.min_numbers",
    ),
    ({"families": ["gcd"], "options": {"gcd": {"seed": 3}}}, "unknown key task.options.gcd.seed"),
    ({"families": ["gcd"], "options": {"gcd": {"min_numbers": 0}}}, "task.options.gcd cannot be used: min_numbers"),
    (
        {
            "families": ["maze"],
            "options": {"maze": {"min_grid_size": 5, "max_grid_size": 5, "min_dist": 90, "max_dist": 99}},
        },
        "the family maze cannot make a problem; change task.options.maze: ",
    ),
    ({"families": ["gcd"], "options": {"gcd": {"min_numbers": "x"}}}, "task.options.gcd cannot be used: "),
]


@pytest.mark.parametrize(("settings", "sentence"), ERRORS)
def test_wrong_families_and_options(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(TracefpError) as caught:
        ReasoningGym(ReasoningGymConfig(**settings))
    assert sentence in str(caught.value)


def test_too_few_problems_and_out_of_range() -> None:
    few = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    task = ReasoningGym(ReasoningGymConfig(families=["chain_sum"], options=few, test_size=150))
    with pytest.raises(TracefpError, match=r"the family chain_sum has too few distinct problems"):
        task.train_prompts(0, 100)
    with pytest.raises(
        TracefpError, match=r"there are 150 held-out problems, 151 were asked for: raise task.test_size"
    ):
        task.test_prompts(151)
    for step, n in ((-1, 1), (2**31, 1), (0, 0)):
        with pytest.raises(TracefpError, match="must lie in"):
            task.train_prompts(step, n)


def test_a_scorer_that_raises_gives_nothing() -> None:
    task = ReasoningGym(config("prime_factorization"))
    assert (
        task.score(Prompt("x", "?", "2", {"family": "prime_factorization", "reference": "2", "item": {}}), "zz") == 0.0
    )
