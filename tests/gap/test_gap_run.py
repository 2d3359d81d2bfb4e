"""The whole check: forms of a small model, servers, a judge; stopped, resumed, damaged."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gap_models import checkpoint
from gap_server import Bad, completion, fake_server
from tracefp4.errors import TracefpError
from tracefp4.gap.answers import Sampling
from tracefp4.gap.forms import EndpointForm, parse_form
from tracefp4.gap.gate import Gate
from tracefp4.gap.inquiries import ReadOptions, read_inquiries
from tracefp4.gap.run import GapOptions, GapRequest, gap
from tracefp4.report import RunFolderError

SHORT = Sampling(samples=2, temperature=0.7, max_new_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("run") / "m")


def inquiries(path: Path, *rows: dict[str, Any], **options: Any) -> Any:
    file = path / "q.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return read_inquiries(file, ReadOptions(**options))


def letters(count: int) -> list[dict[str, Any]]:
    return [
        {"id": f"q{i}", "prompt": f"Number {i}", "answer": "aeiou"[i % 5], "check": "contains"} for i in range(count)
    ]


def request(train: str, serve: str, file: Any, sampling: Sampling = SHORT, **more: Any) -> GapRequest:
    options = GapOptions(**{"batch_size": 5, "concurrency": 2, "retries": 0, "timeout": 5.0, **more.pop("options", {})})
    return GapRequest(parse_form("t", train), parse_form("s", serve), file, sampling, options, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_form_against_itself_differs_in_nothing(tmp_path: Path, model: Path) -> None:
    facts = gap(request(str(model), str(model), inquiries(tmp_path, *letters(6)), gate=Gate(0.9)), tmp_path / "out")
    assert facts["complete"]
    assert facts["difference"]["value"] == 0
    assert facts["pairs"]["same_text"] == facts["pairs"]["pairs"] == 12
    assert facts["distance"]["mean_abs"] < 1e-5
    assert facts["gate"]["verdict"] == "pass"
    assert (tmp_path / "out" / "flips.jsonl").read_text() == ""


def test_forms_that_differ(tmp_path: Path, model: Path) -> None:
    file = inquiries(tmp_path, *letters(15))
    facts = gap(request(str(model), f"{model}@mxfp4-even-w4a4", file), tmp_path / "out")
    pairs, d = facts["pairs"], facts["difference"]
    assert pairs["lost"] + pairs["gained"] > 0
    assert pairs["both_pass"] + pairs["lost"] + pairs["gained"] + pairs["both_fail"] == pairs["pairs"] == 30
    assert d["value"] == pytest.approx((pairs["gained"] - pairs["lost"]) / 30)
    assert d["low"] <= d["value"] <= d["high"]
    flips = lines(tmp_path / "out" / "flips.jsonl")
    assert len(flips) == pairs["lost"] + pairs["gained"]
    for flip in flips:
        passed = {side: flip["answer"][0] in flip[side]["text"].casefold() for side in ("train", "serve")}
        assert passed == {"train": flip["outcome"] == "lost", "serve": flip["outcome"] == "gained"}
    assert facts["distance"]["how"].startswith("each form scored")
    assert facts["distance"]["mean_abs"] > 0.01
    assert {side: f["answers"] for side, f in facts["forms"].items()} == {"train": 30, "serve": 30}
    assert facts["about"]["serve"]["rounded"]["layers"] == 14
    assert "<svg" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_stopped_check_goes_on_and_writes_what_an_unbroken_one_writes(tmp_path: Path, model: Path) -> None:
    file = inquiries(tmp_path, *letters(7))
    asked = request(str(model), f"{model}@nvfp4", file)
    whole = gap(asked, tmp_path / "whole")
    half = tmp_path / "half"
    gap(asked, half)
    for name in ("answers-train.jsonl", "answers-serve.jsonl"):  # as a kill leaves it: whole lines and a piece of one
        text = (half / name).read_text()
        kept = text.splitlines(keepends=True)[: 14 if "train" in name else 5]
        (half / name).write_text("".join(kept) + '{"id": "q')
    (half / "report.html").unlink()
    (half / "scores.jsonl").unlink()
    with pytest.raises(RunFolderError, match="--resume"):
        gap(asked, half)
    again = gap(asked, half, resume=True)
    same = ("difference", "pairs", "gate", "categories", "distance", "inquiries")
    assert {k: again[k] for k in same} == {k: whole[k] for k in same}
    assert (half / "flips.jsonl").read_text() == (tmp_path / "whole" / "flips.jsonl").read_text()
    assert again["about"]["train"]["dtype"] == "float32"


def test_a_resumed_check_must_be_the_same(tmp_path: Path, model: Path) -> None:
    file = inquiries(tmp_path, *letters(3))
    asked = request(str(model), str(model), file, Sampling(max_new_tokens=2), options={"logprobs": 0})
    gap(asked, tmp_path / "out")
    for other, message in (
        (replace(asked, sampling=Sampling(max_new_tokens=3)), "--max-new-tokens = 2, now it is 3"),
        (replace(asked, serve=parse_form("s", f"{model}@nvfp4")), "--serve-form"),
        (replace(asked, file=inquiries(tmp_path, *letters(4))), "other questions"),
    ):
        with pytest.raises(TracefpError, match=message):
            gap(other, tmp_path / "out", resume=True)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").write_text("x")
    with pytest.raises(TracefpError, match="left alone"):
        gap(asked, tmp_path / "foreign", overwrite=True)


def test_changed_checks_are_marked_anew_without_asking_again(tmp_path: Path) -> None:
    with fake_server(lambda body, n: "Yes, of course.") as server:
        url = f"{server.url}?model=m"
        rows = [{"id": i, "prompt": f"May I {i}?", "answer": "no", "check": "contains"} for i in range(4)]
        asked = request(url, url, inquiries(tmp_path, *rows), Sampling())
        assert gap(asked, tmp_path / "out")["forms"]["train"]["passed"] == 0
        count = len(server.requests)
        asked = replace(asked, file=inquiries(tmp_path, *({**row, "answer": "yes"} for row in rows)))
        assert gap(asked, tmp_path / "out", resume=True)["forms"]["train"]["passed"] == 4
        assert len(server.requests) == count


def test_failed_requests_are_neither_right_nor_wrong_and_are_asked_again(tmp_path: Path) -> None:
    broken = [True]

    def script(body: dict[str, Any], n: int) -> Any:
        number = int(body["messages"][-1]["content"].split()[-1])
        return Bad(500, b"oops") if broken[0] and number % 4 == 0 and body["model"] == "s" else "right"

    rows = [{"id": f"q{i}", "prompt": f"Say {i}", "answer": "right", "check": "exact"} for i in range(100)]
    with fake_server(script) as server:
        asked = request(
            f"{server.url}?model=t", f"{server.url}?model=s", inquiries(tmp_path, *rows), Sampling(), gate=Gate(0.1)
        )
        facts = gap(asked, tmp_path / "out")
        assert facts["inquiries"]["missing"] == 25
        assert facts["difference"]["value"] == 0
        assert facts["gate"]["verdict"] == "undecided"
        assert "lack an answer" in facts["gate"]["reason"]
        assert facts["forms"]["serve"]["failures"] == {"HTTP 500: oops": 25}
        assert "HTTP 500: oops" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        broken[0] = False
        before = len(server.requests)
        facts = gap(asked, tmp_path / "out", resume=True)
        assert len(server.requests) == before + 25
    assert facts["inquiries"]["missing"] == 0
    assert facts["gate"]["verdict"] == "pass"


def test_an_endpoint_that_stops_answering_loses_nothing(tmp_path: Path) -> None:
    alive = [True]
    rows = [{"id": f"q{i}", "prompt": f"Say {i}", "answer": "right", "check": "exact"} for i in range(60)]

    def script(body: dict[str, Any], n: int) -> Any:
        return "right" if (alive[0] and n < 40) or n > 10_000 else Bad(503)

    with fake_server(script) as server:
        asked = request(f"{server.url}?model=m", f"{server.url}?model=m", inquiries(tmp_path, *rows), Sampling())
        with pytest.raises(TracefpError, match="in a row have failed"):
            gap(asked, tmp_path / "out")
        had = [line for line in lines(tmp_path / "out" / "answers-train.jsonl") if "text" in line]
        assert len(had) == 40


def test_a_form_that_answered_nothing_may_be_named_anew(tmp_path: Path) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        return Bad(400 if n % 2 else 500) if body["model"] == "typo" else "right"

    rows = [{"id": f"q{i}", "prompt": f"Say {i}", "answer": "right", "check": "exact"} for i in range(30)]
    with fake_server(script) as server:
        url = f"{server.url}?model="
        asked = request(f"{url}t", f"{url}typo", inquiries(tmp_path, *rows), Sampling())
        with pytest.raises(TracefpError, match="in a row have failed"):
            gap(asked, tmp_path / "out")
        before = len(server.requests)
        with pytest.raises(TracefpError, match="--train-form"):
            gap(replace(asked, train=parse_form("t", f"{url}other")), tmp_path / "out", resume=True)
        facts = gap(replace(asked, serve=parse_form("s", f"{url}s")), tmp_path / "out", resume=True)
        assert len(server.requests) == before + 30
    assert facts["pairs"]["both_pass"] == 30
    assert facts["settings"]["--serve-form"] == f"{url}s"
    assert [line["side"] for line in lines(tmp_path / "out" / "timing.jsonl")] == ["train", "train", "serve", "serve"]


def test_an_endpoint_with_log_probs_against_weights(tmp_path: Path, model: Path) -> None:
    """A server that serves the very model: its log-probs, and the ones it gives for the other's tokens, agree."""
    from tracefp4.gap.local import load_runner

    sampling = Sampling(max_new_tokens=6)
    runner: Any = load_runner(parse_form("t", str(model)), sampling, "cpu", "auto", 4)  # type: ignore[arg-type]

    def script(body: dict[str, Any], n: int) -> Any:
        if "messages" in body:
            (a,) = runner.generate([runner.encode(body["messages"])], [body["seed"]])
            pairs = [(f"token_id:{t}", v) for t, v in zip(a.token_ids, a.logprobs, strict=True)]
            return completion(a.text, pairs, a.finish)
        ids = body["prompt"]
        (scores,) = runner.score([ids[:1]], [ids[1:]])
        return {
            "choices": [
                {"prompt_logprobs": [None, *({str(t): {"logprob": v}} for t, v in zip(ids[1:], scores, strict=True))]}
            ]
        }

    with fake_server(script) as server:
        asked = request(str(model), f"{server.url}?model=m", inquiries(tmp_path, *letters(6)), sampling)
        facts = gap(asked, tmp_path / "out")
    assert facts["pairs"]["same_text"] == 6
    by_side = facts["distance"]["by_side"]
    assert by_side["train"]["answers"] == by_side["serve"]["answers"] == 6
    assert facts["distance"]["max_abs"] < 1e-4


def test_two_endpoints_are_compared_where_they_wrote_alike(tmp_path: Path) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        shift = 0.5 if body["model"] == "s" else 0.0
        return completion("a b", [("a", -1.0 - shift), (" b" if shift else " c", -2.0)])

    with fake_server(script) as server:
        asked = request(f"{server.url}?model=t", f"{server.url}?model=s", inquiries(tmp_path, *letters(3)), Sampling())
        found = gap(asked, tmp_path / "out")["distance"]
    assert (found["tokens"], found["mean"]) == (3, pytest.approx(-0.5))
    assert "wrote alike" in found["how"]


def test_endpoints_without_log_probs_say_so(tmp_path: Path) -> None:
    with fake_server(lambda body, n: "an answer") as server:
        asked = request(f"{server.url}?model=t", f"{server.url}?model=s", inquiries(tmp_path, *letters(3)), Sampling())
        found = gap(asked, tmp_path / "out")["distance"]
    assert found["tokens"] == 0
    assert "neither form gives" in found["reason"]


def test_a_judge_is_asked_blind_and_may_fail(tmp_path: Path) -> None:
    def script(body: dict[str, Any], n: int) -> Any:
        text = body["messages"][-1]["content"]
        if body["model"] != "judge":
            return f"answer of {body['model']}. VERDICT: PASS" if "2" not in text else "odd"
        if "answer\nodd" in text:
            return "I cannot say."
        return "It is polite. **VERDICT: PASS**" if "answer of t" in text else "It is rude.\nVERDICT: FAIL"

    rows = [
        {"id": f"q{i}", "prompt": f"Number {i}", "check": {"kind": "judge", "rubric": "Is polite."}} for i in range(4)
    ]
    with fake_server(script) as server:
        url = server.url
        judge = parse_form("--judge", f"{url}?model=judge")
        assert isinstance(judge, EndpointForm)
        asked = request(f"{url}?model=t", f"{url}?model=s", inquiries(tmp_path, *rows), Sampling(), judge=judge)
        facts = gap(asked, tmp_path / "out")
        judged = [r["messages"][-1]["content"] for r in server.requests if r["model"] == "judge"]
    assert facts["difference"]["value"] == -1
    assert facts["inquiries"]["missing"] == 1
    assert "the judge named no verdict" in next(iter(facts["forms"]["serve"]["unchecked"]))
    assert all("Is polite." in text and "serve" not in text and "training" not in text for text in judged)
    with pytest.raises(TracefpError, match="--judge ENDPOINT"):
        gap(replace(asked, judge=None), tmp_path / "none")


def test_all_kinds_of_checks_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def long(prompt, response):\n    return len(response) / prompt['metadata']['length']\n"
    )
    command = ["python3", "-c", "import json,sys; d=json.load(sys.stdin); sys.exit(d['answer'] not in d['response'])"]
    cases: list[tuple[Any, Any, str, str]] = [
        ("exact", "no", "no", "No"),
        ("normalized", "No.", "no!", "no way"),
        ("contains", ["red", "BLUE"], "Blue and red", "blue"),
        ({"kind": "contains", "mode": "any"}, ["red", "blue"], "blue", "green"),
        ({"kind": "contains", "mode": "none"}, ["red"], "blue", "Red"),
        ("numeric", 12, "It is 12.", "It is 13."),
        ("numeric", [12, 13], "It is 13.", "It is 14."),
        ({"kind": "math", "workers": 1}, "1/2", "\\boxed{0.5}", "\\boxed{0.6}"),
        ({"kind": "regex", "pattern": "^a+$", "workers": 1}, None, "aaa", "aab"),
        ({"kind": "regex", "pattern": "b", "workers": 1}, None, "aab", "aaa"),
        ({"kind": "regex", "workers": 1}, "c.t", "a cat", "a dog"),
        ({"kind": "json_schema", "schema": {"required": ["x"]}}, None, '```json\n{"x": 1}\n```', '{"y": 1}'),
        ({"kind": "json_schema", "schema": True}, None, "[1]", "[1"),
        ({"kind": "python", "function": f"{tmp_path}/f.py:long", "pass_at": 2, "workers": 1}, None, "x" * 20, "x" * 19),
        ({"kind": "command", "command": command}, "yes", "yes", "no"),
        (["contains", {"kind": "regex", "pattern": r"\.$", "workers": 1}], "ok", "ok.", "ok"),
    ]
    rows = [
        {"id": f"c{i}", "prompt": f"case {i}", "check": check, "length": 10}
        | ({} if answer is None else {"answer": answer})
        for i, (check, answer, _, _) in enumerate(cases)
    ]

    def script(body: dict[str, Any], n: int) -> str:
        _, _, right, wrong = cases[int(body["messages"][-1]["content"].split()[-1])]
        return right if body["model"] == "t" else wrong

    with fake_server(script) as server:
        file = inquiries(tmp_path, *rows, allow_code=True)
        facts = gap(request(f"{server.url}?model=t", f"{server.url}?model=s", file, Sampling()), tmp_path / "out")
    flips = {flip["id"]: flip["outcome"] for flip in lines(tmp_path / "out" / "flips.jsonl")}
    assert flips == {f"c{i}": "lost" for i in range(len(cases))}
    assert facts["difference"]["value"] == -1
    assert not math.isnan(facts["difference"]["low"])


@pytest.mark.parametrize(
    ("check", "message"),
    [
        ({"kind": "command", "command": "sh -c 'echo broken >&2; exit 3'"}, "exit code 3 on inquiry q0.*broken"),
        ({"kind": "command", "command": "no-such-program"}, "no-such-program cannot start"),
        ({"kind": "python", "function": "no_such_module:f"}, "cannot be imported"),
    ],
)
def test_a_broken_check_stops_and_keeps_the_answers(tmp_path: Path, check: dict[str, Any], message: str) -> None:
    with fake_server(lambda body, n: "fine") as server:
        file = inquiries(
            tmp_path, *({"id": f"q{i}", "prompt": f"{i}", "check": check} for i in range(6)), allow_code=True
        )
        url = f"{server.url}?model=m"
        with pytest.raises(TracefpError, match=message):
            gap(request(url, url, file, Sampling()), tmp_path / "out")
        assert len(server.requests) <= 4  # the first few are checked before the rest is asked


def test_a_command_that_hangs_fails_the_answer(tmp_path: Path) -> None:
    check = {"kind": "command", "command": ["sh", "-c", "sleep 60"], "timeout": 0.2}
    with fake_server(lambda body, n: "fine") as server:
        file = inquiries(tmp_path, {"id": "q", "prompt": "x", "check": check}, allow_code=True)
        url = f"{server.url}?model=m"
        assert gap(request(url, url, file, Sampling()), tmp_path / "out")["pairs"]["both_fail"] == 1


def test_a_prompt_that_does_not_fit_is_missing(tmp_path: Path, model: Path) -> None:
    rows = [*letters(2), {"id": "long", "prompt": "x" * 300, "answer": "a", "check": "contains"}]
    facts = gap(
        request(str(model), str(model), inquiries(tmp_path, *rows), Sampling(max_new_tokens=3)), tmp_path / "out"
    )
    assert facts["inquiries"]["missing"] == 1
    assert "the model takes 256" in next(iter(facts["forms"]["train"]["failures"]))


def test_a_serving_form_without_a_tokenizer_is_named_before_the_other_answers(tmp_path: Path, model: Path) -> None:
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    asked = request(str(model), f"{bare}@nvfp4", inquiries(tmp_path, *letters(2)))
    with pytest.raises(TracefpError, match="bare has no tokenizer"):
        gap(asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    url = "http://127.0.0.1:9/v1?model=m"
    with pytest.raises(TracefpError, match="GAP_NO_SUCH_KEY"):
        gap(request(str(model), f"{url}&key_env=GAP_NO_SUCH_KEY", inquiries(tmp_path, *letters(2))), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_is_named(tmp_path: Path, model: Path) -> None:
    asked = request(str(model), str(model), inquiries(tmp_path, *letters(3)), Sampling(max_new_tokens=2))
    gap(asked, tmp_path / "out")
    with (tmp_path / "out" / "answers-serve.jsonl").open("a") as file:
        file.write('{"id": 3\n')
    with pytest.raises(TracefpError, match=r"answers-serve.jsonl line 4 is damaged"):
        gap(asked, tmp_path / "out", resume=True)
