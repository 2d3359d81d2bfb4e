"""The task `dataset`: the formats people already have, what is held out, the order, and every wrong row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import BatchScorer, Task, make_task
from tracefp4.tasks.checks import CheckConfig
from tracefp4.tasks.dataset import DatasetConfig, DatasetTask
from tracefp4.tasks.records import load_problems

WORD_SUMS = Path(__file__).parents[1] / "data" / "word_sums.jsonl"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def task(rows: list[dict[str, Any]] | str, **settings: Any) -> DatasetTask:
    text = rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
    Path("a.jsonl").write_text(text)
    return DatasetTask(DatasetConfig(path="a.jsonl", **settings))


def only(rows: list[dict[str, Any]] | str, **settings: Any) -> Any:
    made = task(rows, **settings)
    return made.train_prompts(0, len(made.pool.train))[0]


def test_the_shipped_file_in_gsm8k_format_trains_as_it_is() -> None:
    made = make_task(DatasetConfig(path=str(WORD_SUMS), test_size=10))
    assert isinstance(made, Task)
    assert isinstance(made, BatchScorer)
    assert isinstance(made, DatasetTask)
    assert made.check_config.kind == "math"
    assert "50 training and 10 held-out problems" in made.description
    assert "the answer from answer after ####; check math, chosen by the answers" in made.description
    source = {row["question"]: row["answer"] for row in map(json.loads, WORD_SUMS.read_text().splitlines())}
    prompts = [*made.train_prompts(0, 50), *made.test_prompts(10)]
    assert {p.text for p in prompts} == set(source)
    for p in prompts:
        assert made.score(p, source[p.text]) == 1.0
        assert made.score(p, "#### 123456") == 0.0
        assert source[p.text].endswith(f"#### {p.answer}")
    assert made.score_batch(prompts[:2], ["#### " + prompts[0].answer, "no idea"]) == [1.0, 0.0]


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
FORMATS = [
    ({"question": "1+1?", "answer": "One more.\n#### 1,002"}, "1+1?", "1,002", "math"),
    ({"prompt": "1+1?", "answer": 2, "level": 3}, "1+1?", "2", "math"),
    ({"prompt": "half?", "answer": 0.5}, "half?", "0.5", "math"),
    ({"prompt": "half?", "answer": 2.0}, "half?", "2", "math"),
    ({"prompt": "capital?", "answer": " Paris "}, "capital?", "Paris", "exact"),
    ({"problem": "1+1?", "solution": r"We get $\boxed{\frac{4}{2}}$."}, "1+1?", r"\frac{4}{2}", "math"),
    ({"problem": "1+1?", "solution": r"\boxed{9}", "answer": "2"}, "1+1?", "2", "math"),
    (
        {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "x"},
        "Be brief.\n\n1+1?",
        "2",
        "math",
    ),
    ({"messages": [*CHAT, {"role": "assistant", "content": "two"}]}, "Be brief.\n\n1+1?", "two", "exact"),
    ({"messages": CHAT, "answer": "2"}, "Be brief.\n\n1+1?", "2", "math"),
]


@pytest.mark.parametrize(("row", "text", "answer", "kind"), FORMATS)
def test_known_formats(row: dict[str, Any], text: str, answer: str, kind: str) -> None:
    made = task([row])
    (prompt,) = made.train_prompts(0, 1)
    assert (prompt.text, prompt.answer, made.check_config.kind) == (text, answer, kind)
    user = {"role": "user", "content": text.removeprefix("Be brief.\n\n")}
    assert prompt.messages == ((CHAT[0], user) if "Be brief" in text else (user,))


def test_other_fields_are_kept_as_plain_json() -> None:
    import datetime

    row = {"prompt": "a?", "answer": "b", "day": datetime.date(2024, 1, 2), "tags": ["x"]}
    pq.write_table(pa.Table.from_pylist([row]), "a.parquet")
    (prompt,) = DatasetTask(DatasetConfig(path="a.parquet")).train_prompts(0, 1)
    assert prompt.metadata == {"day": "2024-01-02", "tags": ["x"]}


def test_fields_by_name_template_and_system_message() -> None:
    row = {"q": {"text": "{x} of 1+1?"}, "a": {"b": "2"}, "prompt": "no"}
    settings = {"prompt_field": "q.text", "answer_field": "a.b"}
    prompt = only([row], template="{prompt}\nAnswer after ####:", system="You add.", **settings)
    assert prompt.text == "You add.\n\n{x} of 1+1?\nAnswer after ####:"
    assert prompt.messages == (
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "{x} of 1+1?\nAnswer after ####:"},
    )
    chat = only([{"talk": CHAT, "answer": "2"}], messages_field="talk", template="Q: {prompt}", system="unused")
    assert [m["content"] for m in chat.messages] == ["Be brief.", "Q: 1+1?"]


@pytest.mark.parametrize("answer", [{}, {"answer": None}])
def test_a_check_by_function_needs_no_answers(answer: dict[str, Any]) -> None:
    Path("rewards.py").write_text(
        "def score(prompt, response):\n    return float(len(response) == prompt.metadata['length'])\n"
    )
    check = CheckConfig(kind="python", function="rewards.py:score")
    made = DatasetConfig(path="a.jsonl", check=check)
    Path("a.jsonl").write_text(json.dumps({"prompt": "Write.", "length": 3, **answer}) + "\n")
    assert not made.needs_answer
    if answer:
        with pytest.raises(TracefpError, match="answer is null"):
            load_problems(made)
        return
    (prompt,) = load_problems(made).train
    assert (prompt.answer, prompt.metadata) == ("", {"length": 3})
    with pytest.raises(TracefpError, match=r"name one in task\.answer_field"):
        load_problems(DatasetConfig(path="a.jsonl"))


def test_tests_in_the_answer_field_are_json() -> None:
    tests = [{"input": "1", "output": "2"}]
    Path("a.jsonl").write_text(json.dumps({"prompt": "Double.", "answer": tests}) + "\n")
    (prompt,) = load_problems(DatasetConfig(path="a.jsonl", check=CheckConfig(kind="program"))).train
    assert json.loads(prompt.answer) == tests


def test_csv_columns_are_text() -> None:
    Path("a.csv").write_text('question,answer\n"1,5 + 1,5?",3\nzip?,00501\n')
    made = DatasetTask(DatasetConfig(path="a.csv", check=CheckConfig(kind="exact")))
    assert {p.text: p.answer for p in made.train_prompts(0, 2)} == {"1,5 + 1,5?": "3", "zip?": "00501"}


# No numbers: the check is then a comparison of texts, and starts no workers.
ROWS = [{"prompt": f"{i}+{i}?", "answer": f"n{2 * i}"} for i in range(20)]


def test_passes_are_shuffled_complete_and_found_from_any_step() -> None:
    made = task(ROWS)
    steps = [[p.text for p in made.train_prompts(step, 6)] for step in range(9)]
    assert all(len(set(texts)) == 6 for texts in steps)
    passes = [steps[k] + steps[k + 1] + steps[k + 2] for k in (0, 3, 6)]
    assert all(len(set(texts)) == 18 for texts in passes)  # 20 // 6 steps a pass, two rows sit out
    assert passes[0] != passes[1] != passes[2]
    again = task(ROWS)
    assert [[p.text for p in again.train_prompts(step, 6)] for step in reversed(range(9))] == steps[::-1]
    assert [p.text for p in task(ROWS, seed=1).train_prompts(0, 6)] != steps[0]


def test_held_out_rows_depend_neither_on_order_nor_on_the_seed_nor_on_the_template() -> None:
    first = task(ROWS, test_share=0.3)
    test = [p.answer for p in first.test_prompts(len(first.pool.test))]
    assert 2 <= len(test) <= 10
    other = task(ROWS[::-1], test_share=0.3, seed=5, template="Q: {prompt}")
    assert [p.answer for p in other.test_prompts(len(test))] == test
    more = task(ROWS + [{"prompt": f"{i}*2?", "answer": "n"} for i in range(20)], test_share=0.3)
    assert set(test) <= {p.answer for p in more.pool.test}
    assert len(task(ROWS, test_size=7).pool.test) == 7
    assert not {p.text for p in first.pool.train} & {p.text for p in first.pool.test}


def test_repeated_and_leaked_prompts_are_left_out_and_counted() -> None:
    Path("t.jsonl").write_text(json.dumps(ROWS[3]) + "\n" + json.dumps({"prompt": "new?", "answer": "m"}) + "\n")
    made = task([*ROWS, ROWS[0], {"prompt": " 1+1? ", "answer": "k"}], test_path="t.jsonl")
    assert (len(made.pool.train), len(made.pool.test)) == (19, 2)
    assert "2 repeated and 1 held-out prompts left out" in made.description
    assert ROWS[3]["prompt"] not in {p.text for p in made.pool.train}


def test_too_few_rows_name_both_settings() -> None:
    with pytest.raises(TracefpError, match=r"task\.path a\.jsonl has 20 training .* lower sampling\.prompts_per_step"):
        task(ROWS).train_prompts(0, 21)
    with pytest.raises(TracefpError, match=r"has 0 held-out problems, 1 were asked for: set task\.test_path"):
        task(ROWS).test_prompts(1)


GOOD = '{"prompt": "a?", "answer": "b"}\n'
WRONG = [
    (GOOD + '{"prompt": "c?"}\n', "a.jsonl line 2 has no field answer; its fields are prompt"),
    (GOOD + '\n{"prompt": null, "answer": "b"}\n', "a.jsonl line 3: prompt is null"),
    (GOOD + '{"prompt": "c?", "answer": null}\n', "a.jsonl line 2: answer is null"),
    (GOOD + '{"prompt": "  ", "answer": "b"}\n', "a.jsonl line 2: prompt is empty"),
    (GOOD + '{"prompt": "c?", "answer": ""}\n', "a.jsonl line 2: answer is empty"),
    (GOOD + '{"prompt": "c?", "answer": 3}\n', "a.jsonl line 2: answer is a number, in a.jsonl line 1 it is text"),
    (GOOD + '{"prompt": 3, "answer": "b"}\n', "a.jsonl line 2: prompt is a number, in a.jsonl line 1 it is text"),
    (GOOD + '{"prompt": [], "answer": "b"}\n', "a.jsonl line 2: prompt is a list, in a.jsonl line 1 it is text"),
    ('{"prompt": "a?", "answer": true}\n', "a.jsonl line 1: answer is true or false, not text"),
    ('{"prompt": "a?", "answer": NaN}\n', "a.jsonl line 1: answer is nan, not text"),
    ('{"prompt": "a?", "answer": ["b"]}\n', "a.jsonl line 1: answer is a list, not text"),
    ('{"prompt": "\\ud83d", "answer": "b"}\n', "a.jsonl line 1: prompt holds half of a surrogate pair"),
    (
        '{"question": "a?", "answer": "x\\n#### 1"}\n{"question": "b?", "answer": "1"}\n',
        "a.jsonl line 2: answer has no answer after ####, unlike the file's first row",
    ),
    (
        '{"text": "a?", "label": "b"}\n',
        "a.jsonl line 1 has no field that could be the prompt (prompt, question, problem, messages); its fields are "
        "text, label: name one in task.prompt_field",
    ),
    ('{"prompt": "a?", "label": "b"}\n', "name one in task.answer_field"),
    ('{"messages": [{"role": "user", "content": "a"}]}\n', "a.jsonl line 1: the last message is not the assistant's"),
    ('{"messages": [{"role": "user"}], "answer": "1"}\n', "each message of messages must have a role and a content"),
    ('{"messages": [{"role": "usr", "content": "a"}], "answer": "1"}\n', "a message of role 'usr'; did you mean user?"),
    ('{"messages": [{"role": "user", "content": [1]}], "answer": "1"}\n', "messages.content is a list, not text"),
    ('{"messages": [{"role": "system", "content": "a"}], "answer": "1"}\n', "messages has no message of the user"),
    ('{"messages": [], "answer": "1"}\n', "a.jsonl line 1: messages is an empty list, not a list of chat messages"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_wrong_rows(text: str, sentence: str) -> None:
    with pytest.raises(TracefpError) as caught:
        task(text)
    assert sentence in str(caught.value)


def test_a_field_that_no_row_has_lists_the_fields() -> None:
    with pytest.raises(TracefpError, match=r"a\.jsonl line 1 has no field qq; its fields are prompt, answer"):
        task(ROWS, prompt_field="qq")


def test_a_csv_without_a_header_says_so() -> None:
    Path("a.csv").write_text("1+1?,2\n2+2?,4\n")
    with pytest.raises(
        TracefpError, match=r"its fields are 1\+1\?, 2: .* or give the file a first line of column names"
    ):
        DatasetTask(DatasetConfig(path="a.csv"))
