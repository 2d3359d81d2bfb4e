import json
import math
import time
from pathlib import Path

import pytest

from tracefp4.errors import TracefpError
from tracefp4.tasks import Prompt, Task, ToolTask, make_task
from tracefp4.tasks.bm25 import BM25
from tracefp4.tasks.text_search import TextSearch, TextSearchConfig, normalised

TASK = TextSearch(TextSearchConfig())


def test_bm25_is_the_formula() -> None:
    index = BM25(["the cat sat", "the dog", "a cat and a cat", ""])
    assert index.top("cat", 3) == [2, 0]
    assert index.top("the dog", 3) == [1, 0]
    assert index.top("CAT?", 1) == [2]
    assert index.top("horse", 3) == []
    assert index.top("", 3) == []
    mean, idf = 10 / 4, math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    weight = 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 5 / mean))
    assert index._idf["cat"] * dict(index._postings["cat"])[2] == pytest.approx(idf * weight)


def test_contracts_and_a_stable_world() -> None:
    assert isinstance(make_task(TextSearchConfig()), Task)
    assert isinstance(TASK, ToolTask)
    assert TASK.passages == TextSearch(TextSearchConfig(seed=7)).passages
    assert TASK.test_prompts(10) == TextSearch(TextSearchConfig(seed=7)).test_prompts(10)
    assert TASK.train_prompts(0, 16) != TextSearch(TextSearchConfig(seed=7)).train_prompts(0, 16)
    assert not {p.text for p in TASK.pool.train} & {p.text for p in TASK.pool.test}
    assert len(TASK.pool.train) + len(TASK.pool.test) == 240
    assert "240" not in TASK.description
    assert f"{len(TASK.pool.test)} held-out questions on 150 passages" in TASK.description
    assert len({p.text for p in [*TASK.pool.train, *TASK.pool.test]}) == 240
    assert len(TextSearch(TextSearchConfig(people=400)).pool.train) > 500


def found(prompt: Prompt, query: str, turns: int = 1) -> str:
    reply = TASK.respond(prompt, [f"hm <search>{query}</search>"] * turns)
    assert reply is not None
    return reply


def test_every_question_can_be_answered_by_searching() -> None:
    for prompt in [*TASK.pool.train, *TASK.pool.test]:
        question = prompt.metadata["question"]
        reply = found(prompt, question)
        if "river" in question:
            name = question.split("where ")[1].removesuffix(" lives?")
            line = next(line for line in found(prompt, name).split("\n") if name in line)
            reply = found(prompt, line.rsplit(" ", 1)[1].rstrip("."), turns=2)
        assert prompt.answer in reply
        assert TASK.score(prompt, f"<search>x</search>{reply}#### {prompt.answer}.") == 1.0
        assert TASK.score(prompt, reply) == 0.0


def test_replies() -> None:
    prompt = TASK.train_prompts(0, 1)[0]
    assert found(prompt, "qqqq") == "<passages>error: nothing found</passages>"
    assert found(prompt, "") == "<passages>error: nothing found</passages>"
    lines = found(prompt, "river").split("\n")
    assert (lines[0], lines[-1], len(lines)) == ("<passages>", "</passages>", 5)
    assert [line[:3] for line in lines[1:-1]] == ["1. ", "2. ", "3. "]
    assert TASK.respond(prompt, ["<search>river</search> and so"]) is None
    assert TASK.respond(prompt, ["#### x"]) is None
    assert TASK.respond(prompt, ["<search>river</search>"] * 4) is None
    started = time.perf_counter()
    found(prompt, "river " * 100_000)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(("written", "same"), [("The  Ashe.", True), ("ashe", True), ("Ash", False), ("", False)])
def test_normalised_match(written: str, same: bool) -> None:
    assert (normalised(written) == normalised("Ashe")) is same
    assert normalised("The The") == "The The"


def test_files_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.jsonl").write_text(
        json.dumps({"title": "Oak", "text": "An oak bears #### acorns. " + "x" * 500})
        + "\n"
        + json.dumps({"text": "Pines bear cones."})
        + "\n"
    )
    Path("q.jsonl").write_text(json.dumps({"question": "What does an oak bear?", "answer": "acorns"}) + "\n")
    task = TextSearch(TextSearchConfig(path="q.jsonl", corpus="c.jsonl", passage_length=60, passages=1))
    (prompt,) = task.train_prompts(0, 1)
    assert prompt.text.startswith("What does an oak bear?\nYou may end a message with <search>")
    reply = task.respond(prompt, ["<search>oak bear</search>"])
    assert reply == "<passages>\n1. Oak: An oak bears # # # # acorns. " + "x" * 26 + "...\n</passages>"
    Path("c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(
        TracefpError, match=r"c\.jsonl line 1 of task\.corpus has no passage in the field text; its fields are body"
    ):
        TextSearch(TextSearchConfig(path="q.jsonl", corpus="c.jsonl"))
    with pytest.raises(TracefpError, match=r"task\.corpus no\.jsonl does not exist"):
        TextSearch(TextSearchConfig(path="q.jsonl", corpus="no.jsonl"))
