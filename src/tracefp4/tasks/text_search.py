"""Questions whose answers stand in a small corpus that the policy may search, over several turns.

A turn of the policy that ends in ``<search>QUERY</search>`` is answered by the best passages, by BM25::

    policy       <search>Veldal river</search>
    environment  <passages>
                 1. Veldal lies on the river Lodde and has 11 thousand inhabitants.
                 2. ...
                 </passages>
    policy       #### Lodde

A query that finds nothing gets ``<passages>error: nothing found</passages>``. Any other turn ends the exchange, and so
does the last of ``max_turns``. What follows the last ``####`` of the response must be the answer, where case,
punctuation, articles and white space do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Literal, Self

from pydantic import Field, model_validator

from tracefp4.errors import TracefpError
from tracefp4.tasks.base import Prompt
from tracefp4.tasks.bm25 import BM25, words
from tracefp4.tasks.extract import extract_answer
from tracefp4.tasks.pool import EpochPool, held_out_flags, stable_hash
from tracefp4.tasks.records import FileConfig, load_problems
from tracefp4.tasks.rows import read_rows

MAX_QUERY = 400
BUILTIN_TEST_SHARE = 0.25

INSTRUCTION = (
    "You may end a message with <search>QUERY</search>; the reply shows passages. Write the final answer after #### ."
)

_CALL = re.compile(r"<search>((?:(?!<search>).)*)</search>\s*\Z", re.DOTALL)


class TextSearchConfig(FileConfig):
    """corpus: a file with a field ``text`` (and maybe ``title``) a row; path: questions and answers, read as the task
    dataset reads its file. Both empty: made-up towns and people, the same for every seed; people: how many of them.
    passages: shown for a query; passage_length: characters of each, the rest is cut off. max_turns: of the policy.
    """

    name: Literal["text_search"] = "text_search"
    path: str = ""
    corpus: str = ""
    people: int = Field(default=120, ge=8, le=400)
    passages: int = Field(default=3, ge=1, le=20)
    passage_length: int = Field(default=400, ge=20)
    max_turns: int = Field(default=4, ge=1, le=64)
    template: str = "{prompt}\n" + INSTRUCTION

    @model_validator(mode="after")
    def _both_files_or_none(self) -> Self:
        if bool(self.path) != bool(self.corpus):
            given, other = ("path", "corpus") if self.path else ("corpus", "path")
            raise ValueError(f"{given} is set without {other}: a search over files needs questions and a corpus")
        if self.test_path and not self.path:
            raise ValueError("test_path is set without path and corpus")
        return self


class TextSearch:
    """The task ``text_search``; see ``tracefp4.tasks.base`` for the contracts Task and ToolTask."""

    def __init__(self, config: TextSearchConfig) -> None:
        self.config = config
        if config.path:
            problems = load_problems(config)
            train, test = problems.train, problems.test
            self.passages = read_corpus(Path(config.corpus))
            what = f"task.path {config.path}"
        else:
            self.passages, questions = made_up_world(config.people)
            prompts = [
                Prompt(f"fact-{i}", config.template.replace("{prompt}", question), answer, {"question": question})
                for i, (question, answer) in enumerate(questions)
            ]
            share = config.test_share or BUILTIN_TEST_SHARE
            flags = held_out_flags([p.metadata["question"] for p in prompts], share, config.test_size)
            train = [p for p, held_out in zip(prompts, flags, strict=True) if not held_out]
            test = [p for p, held_out in zip(prompts, flags, strict=True) if held_out]
            test.sort(key=lambda p: stable_hash(p.metadata["question"]))
            what = f"task.people {config.people}"
        self._index = BM25(self.passages)
        self.pool = EpochPool(train, test, config.seed, what)
        self.description = f"{len(train)} training and {len(test)} held-out questions on {len(self.passages)} passages"

    def train_prompts(self, step: int, n: int) -> list[Prompt]:
        """The ``n`` questions of a step; see ``EpochPool`` for the order of the passes."""
        return self.pool.take(step, n)

    def test_prompts(self, n: int) -> list[Prompt]:
        """The first ``n`` held-out questions, in the order of a hash of each."""
        return self.pool.held_out(n, "raise task.test_share or task.test_size")

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        """The best passages for the query that the last turn ends with; None where the exchange is over."""
        call = _CALL.search(turns[-1]) if len(turns) < self.config.max_turns else None
        if call is None:
            return None
        found = self._index.top(call[1][:MAX_QUERY], self.config.passages)
        if not found:
            return "<passages>error: nothing found</passages>"
        lines = [f"{rank}. {self._shown(index)}" for rank, index in enumerate(found, start=1)]
        return "\n".join(["<passages>", *lines, "</passages>"])

    def score(self, prompt: Prompt, response_text: str) -> float:
        """1.0 iff what follows the last ``####`` is the answer, normalised as ``normalised`` says."""
        answer = extract_answer(response_text, "hashes")
        return float(answer is not None and normalised(answer) == normalised(prompt.answer))

    def _shown(self, index: int) -> str:
        # A passage must not look like the policy's final answer.
        text = " ".join(self.passages[index].split()).replace("####", "# # # #")
        length = self.config.passage_length
        return text if len(text) <= length else text[:length].rstrip() + "..."


def normalised(answer: str) -> str:
    """Lower case, without punctuation, articles and repeated white space; the text itself where nothing is left."""
    kept = [word for word in words(answer) if word not in ("a", "an", "the")]
    return " ".join(kept) or answer.strip()


def read_corpus(path: Path) -> list[str]:
    """The passages of a file: each row's ``text``, after its ``title`` where it has one.

    Raises:
        TracefpError: the file cannot be read, or a row has no text.
    """
    passages = []
    for row in read_rows(path, "task.corpus"):
        text, title = row.values.get("text"), row.values.get("title")
        if not isinstance(text, str) or not text.strip():
            fields = ", ".join(map(str, row.values))
            raise TracefpError(f"{row.where} of task.corpus has no passage in the field text; its fields are {fields}")
        passages.append(f"{title}: {text}" if isinstance(title, str) and title.strip() else text)
    return passages


_TRADES = ("glassblower", "beekeeper", "mapmaker", "bell founder", "botanist", "clockmaker", "ferryman", "printer")
_GIVEN = ("Mira", "Tobin", "Elka", "Joren", "Sanna", "Piet", "Oda", "Ruben", "Lise", "Anton", "Vera", "Emil")
_FAMILY = ("Okarin", "Falster", "Brandel", "Sorvik", "Linde", "Marek", "Tavish", "Ostrow", "Quill", "Hallam")
_STARTS = ("Vel", "Ast", "Kor", "Hal", "Mor", "Tas", "Ren", "Dun", "Sel", "Bry", "Ulm", "Fen")
_ENDS = ("mora", "burg", "haven", "stad", "wick", "dal", "ford", "minde", "grove", "holt")
_RIVERS = ("Ashe", "Tiln", "Worre", "Isk", "Branna", "Lodde", "Senn", "Yarrow", "Mell", "Orve", "Cauld", "Druna")


def made_up_world(people: int) -> tuple[list[str], list[tuple[str, str]]]:
    """(passages, (question, answer) pairs) of made-up towns and ``people`` people, always the same.

    Two questions a person: the year of birth, which one search finds, and the river of the person's town, which
    takes two.
    """
    chance = Random("made-up world")
    names = [f"{given} {family}" for given in _GIVEN for family in _FAMILY]
    names += [f"{given} {letter}. {family}" for given in _GIVEN for letter in "BKT" for family in _FAMILY]
    towns = [start + end for start in _STARTS for end in _ENDS]
    chance.shuffle(names)
    chance.shuffle(towns)
    towns = towns[: max(4, people // 4)]
    rivers = {town: chance.choice(_RIVERS) for town in towns}
    passages = [
        f"{town} lies on the river {river} and has {chance.randrange(2, 90)} thousand inhabitants."
        for town, river in rivers.items()
    ]
    questions = []
    for name in names[:people]:
        town, trade, year = chance.choice(towns), chance.choice(_TRADES), chance.randrange(1700, 1990)
        passages.append(f"{name}, a {trade}, was born in {year} and lives in {town}.")
        questions.append((f"In which year was {name} born?", str(year)))
        questions.append((f"On which river lies the town where {name} lives?", rivers[town]))
    chance.shuffle(passages)
    return passages, questions
