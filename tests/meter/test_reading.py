"""Layouts of frameworks, and files as they come: broken, in other encodings, long."""

import gzip
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tracefp4.align.metrics import importance_metrics, mismatch_metrics
from tracefp4.errors import TracefpError
from tracefp4.meter.traces.figures import TIS_CAP, Sums
from tracefp4.meter.traces.layouts import LayoutError, Names, Record, read_record
from tracefp4.meter.traces.reading import read_table
from tracefp4.meter.traces.run import TraceRequest, meter_traces

A, B = [-0.5, -1.0, -0.25], [-0.625, -1.0, -0.125]
IDS = [5, 9, 2]


def read(line: dict[str, Any], **names: str) -> Record:
    return read_record(json.loads(json.dumps(line)), Names(**names))


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


SGLANG = {
    "text": "abc",
    "output_ids": IDS,
    "meta_info": {
        "id": "r1",
        "weight_version": "4",
        "output_token_logprobs": [[v, t, None] for v, t in zip(B, IDS, strict=True)],
    },
}
VLLM_COMPLETION = {
    "choices": [{"text": "abc", "token_ids": IDS, "logprobs": {"tokens": ["a", "b", "c"], "token_logprobs": B}}]
}
VLLM_CHAT = {
    "choices": [
        {"logprobs": {"content": [{"token": f"token_id:{t}", "logprob": v} for t, v in zip(IDS, B, strict=True)]}}
    ]
}
VLLM_OFFLINE = {
    "request_id": "r1",
    "outputs": [
        {
            "token_ids": IDS,
            "logprobs": [{str(t): {"logprob": v}, "31": {"logprob": -9.0}} for t, v in zip(IDS, B, strict=True)],
        }
    ],
}


@pytest.mark.parametrize(
    ("line", "layout"),
    [(SGLANG, "sglang"), (VLLM_COMPLETION, "openai"), (VLLM_CHAT, "openai"), (VLLM_OFFLINE, "vllm")],
)
def test_servers_and_engines(line: dict[str, Any], layout: str) -> None:
    record = read(line)
    assert record.layout == layout
    assert record.tokens is not None
    assert record.tokens.tolist() == IDS
    assert record.logprobs["any"].tolist() == B


def test_verl_holds_both_columns() -> None:
    record = read(
        {
            "uid": "u",
            "step": 3,
            "responses": IDS,
            "response_mask": [1, 1, 0],
            "old_log_probs": A,
            "rollout_log_probs": B,
        }
    )
    assert (record.layout, record.step, record.id) == ("verl", 3, "u")
    assert record.mask is not None
    assert record.mask.tolist() == [True, True, False]
    assert record.logprobs["train"].tolist() == A
    assert record.logprobs["rollout"].tolist() == B


def test_slime_keeps_prompt_and_response_in_one_list() -> None:
    line = {
        "tokens": [7, 8, *IDS],
        "response_length": 3,
        "rollout_log_probs": B,
        "log_probs": A,
        "loss_mask": [1, 1, 1],
    }
    record = read(line | {"weight_versions": ["3", "4"], "train_version": 5, "index": 11, "rollout_id": 2})
    assert record.layout == "slime"
    assert record.tokens is not None
    assert record.tokens.tolist() == IDS
    assert record.logprobs["train"].tolist() == A
    assert (record.lag, record.id, record.step) == (2.0, "11", 2)


def test_tokens_in_front_of_the_response_name_the_prompt() -> None:
    def line(prompt: list[int]) -> Record:
        return read({"tokens": [*prompt, *IDS], "log_probs": A, "rollout_log_probs": B, "response_length": 3})

    assert line([7, 8]).prompt == line([7, 8]).prompt != line([7, 9]).prompt
    assert line([]).prompt is None


def test_transformers_and_shifted_log_probs() -> None:
    record = read({"sequences": [4, *IDS], "transition_scores": A})
    assert record.layout == "transformers"
    assert record.tokens is not None
    assert record.tokens.tolist() == IDS


def test_nulls_infinities_and_named_fields() -> None:
    record = read({"token_ids": IDS, "logprobs": [None, "-inf", -9999.0]})
    assert np.isnan(record.logprobs["any"][0])
    assert np.isneginf(record.logprobs["any"][1:]).all()
    nested = read({"x": {"mine": A, "theirs": B}, "t": IDS}, train="x.mine", rollout="x.theirs", tokens="t")
    assert nested.logprobs["train"].tolist() == A
    assert nested.logprobs["rollout"].tolist() == B


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"token_ids": IDS}, "has no log-probs; known fields are train_logprobs"),
        ({"token_ids": IDS, "logprobs": -1.0}, "has a float in logprobs, not a list"),
        ({"token_ids": IDS, "logprobs": [[-1.0]]}, "has a list of lists in logprobs; write one sample a line"),
        ({"token_ids": IDS, "logprobs": ["x"]}, "has an entry in logprobs that is no number"),
        ({"token_ids": ["1", {}], "logprobs": A}, None),
        ({"token_ids": [1], "logprobs": A}, "has 3 log-probs for 1 tokens"),
        (
            {"old_log_probs": A, "rollout_log_probs": B[:2]},
            "log-prob columns of different lengths (3 train, 2 rollout)",
        ),
        ({"logprobs": A, "loss_mask": [1]}, "has 3 log-probs and 1 entries in loss_mask"),
        ({"choices": [{"text": "no"}]}, "has no choices[0].logprobs; ask the server for log-probs"),
        ({"choices": [{}, {}]}, "holds 2 choices; write one sample a line"),
        ({"outputs": [{"token_ids": IDS, "logprobs": [{}]}]}, "outputs[0].logprobs lacks the sampled token 5"),
    ],
)
def test_a_line_that_is_no_record_says_why(line: dict[str, Any], message: str | None) -> None:
    if message is None:  # texts in place of ids are kept as texts
        assert read(line).tokens is None
        return
    with pytest.raises(LayoutError) as caught:
        read(line)
    assert message in str(caught.value)


def test_numbers_beyond_any_log_prob_step_or_token_id() -> None:
    record = read({"token_ids": IDS, "logprobs": [float("nan"), "nan", 1e300], "loss_mask": [1, float("nan"), None]})
    assert np.isposinf(record.logprobs["any"]).all()  # no log-probs, and not the same as null
    assert record.mask is not None
    assert record.mask.tolist() == [True, False, False]
    line = {"token_ids": IDS, "logprobs": A, "step": 10**25, "temperature": 10**400, "lag": 10**400}
    record = read(line)
    assert (record.step, record.temperature, record.lag) == (None, None, None)
    with pytest.raises(LayoutError, match="has an entry in logprobs that is no number"):
        read({"token_ids": IDS, "logprobs": [10**400, -1.0, -1.0]})
    with pytest.raises(LayoutError, match="has an entry in token_ids that is no token id"):
        read({"token_ids": [1, 2.5, 3], "logprobs": A})


def pair(folder: Path, n: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rng = np.random.default_rng(0)
    a, b = [], []
    for _ in range(n):
        values = -rng.exponential(1.0, 8)
        ids = rng.integers(0, 1000, 8).tolist()
        a.append({"token_ids": ids, "logprobs": values.tolist()})
        b.append({"token_ids": ids, "logprobs": np.minimum(values + 0.01 * rng.normal(size=8), 0).tolist()})
    return a, b


def test_broken_lines_are_left_out_and_named(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 200)
    first, second = write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)
    first.write_text(first.read_text()[:-30])  # the last line, cut off
    result = meter_traces(TraceRequest(first, second))
    assert result.verdict.passed
    assert any("a.jsonl line 200 is no valid JSON" in n and "was left out" in n for n in result.notices)
    assert any("1 row of B without a partner" in n for n in result.notices)
    broken = tmp_path / "x.jsonl"
    broken.write_text(json.dumps(a[0]) + "\n{\n[1]\n")
    with pytest.raises(
        TracefpError, match=r"2 of 3 lines of .*x\.jsonl are no records, more than --max-broken 0\.01 al"
    ):
        read_table(broken, Names(), ("train",))


def test_missing_empty_and_one_sided_files(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 3)
    first = write(tmp_path / "a.jsonl", a)
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for path, message in (
        (tmp_path / "no.jsonl", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "empty.jsonl", "is empty: it has no lines"),
    ):
        with pytest.raises(TracefpError, match=message):
            meter_traces(TraceRequest(first, path))
    with pytest.raises(TracefpError, match="no log-probs of the trainer; with one file, each line needs both columns"):
        meter_traces(TraceRequest(first))
    for line, step in ((a, 1), (b, 2)):
        for row in line:
            row["step"] = step
    with pytest.raises(TracefpError, match="--band must be at least 1"):
        meter_traces(TraceRequest(first, first, band=0.5))


def test_other_encodings_and_gzip(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 20)
    for row in a:
        row["text"] = "naïve –"
    first, second = write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in a)
    versions = {
        "utf16.jsonl": content.encode("utf-16"),
        "bom.jsonl": content.encode("utf-8-sig"),
        "latin.jsonl": content.replace("–", "-").encode("latin-1"),
        "crlf.jsonl": content.replace("\n", "\r\n").encode(),
        "a.jsonl.gz": gzip.compress(content.encode()),
        "gzip.jsonl": gzip.compress(content.encode()),  # by content, whatever its name
        "plain.jsonl.gz": content.encode(),
    }
    plain = meter_traces(TraceRequest(first, second)).figures.metrics
    for name, data in versions.items():
        (tmp_path / name).write_bytes(data)
        result = meter_traces(TraceRequest(tmp_path / name, second))
        assert result.figures.metrics == plain, name
        assert bool(result.notices) == (name in ("utf16.jsonl", "latin.jsonl")), name
    (tmp_path / "cut.jsonl.gz").write_bytes(versions["a.jsonl.gz"][:-20])
    with pytest.raises(TracefpError, match=r"cut\.jsonl\.gz cannot be read"):
        meter_traces(TraceRequest(tmp_path / "cut.jsonl.gz", second))


def test_a_pipe_is_read_once_from_its_start(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 20)
    first, second = write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(second.read_bytes())), daemon=True)
    writer.start()
    assert meter_traces(TraceRequest(first, pipe)).figures.metrics == (
        meter_traces(TraceRequest(first, second)).figures.metrics
    )
    writer.join()


def test_nan_is_a_fault_and_null_is_not(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 20)
    second = write(tmp_path / "b.jsonl", b)
    a[3]["logprobs"][2] = a[5]["logprobs"][0] = None
    assert meter_traces(TraceRequest(write(tmp_path / "a.jsonl", a), second)).verdict.passed
    a[3]["logprobs"][2] = a[5]["logprobs"][0] = float("nan")
    a[6]["logprobs"][1], a[6]["loss_mask"] = float("nan"), [1, 0] + [1] * 6  # not counted
    result = meter_traces(TraceRequest(write(tmp_path / "a.jsonl", a), second))
    assert [f.kind for f in result.findings] == ["nan"]
    assert result.findings[0].title == "A holds NaN"
    assert "2 counted log-probs of A" in result.findings[0].evidence[0]
    assert "the first at position 2 of line 4" in result.findings[0].evidence[0]
    assert not result.verdict.passed
    assert result.figures.tokens == 20 * 8 - 3
    for row in a:
        row["logprobs"] = [float("nan")] * 8
    result = meter_traces(TraceRequest(write(tmp_path / "a.jsonl", a), second))
    assert [f.kind for f in result.findings] == ["nan"]
    assert result.figures.tokens == 0


def test_a_sampled_token_that_one_side_holds_impossible_fails(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 20)
    a[3]["logprobs"][2] = "-inf"
    a[4]["logprobs"][2] = b[4]["logprobs"][2] = -9999.0  # on both sides: no distance
    result = meter_traces(TraceRequest(write(tmp_path / "a.jsonl", a), write(tmp_path / "b.jsonl", b)))
    assert result.figures.impossible == 1
    assert result.findings == ()
    assert result.verdict.reasons == ("1 sampled token at log-prob -inf on one side: an infinite distance",)


def test_far_log_probs_overflow_nothing() -> None:
    sums = Sums()
    sums.add(np.array([-1.0, 8000.0]), np.array([-8000.0, -1.0]))
    assert all(np.isfinite(v) for v in sums.metrics().values())


def test_figures_equal_those_of_the_trainer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = -rng.exponential(1.0, 1000), -rng.exponential(1.0, 1000)
    sums = Sums()
    for part in np.split(np.arange(1000), [10, 500]):
        sums.add(a[part], b[part])
    expected = mismatch_metrics(torch.tensor(a), torch.tensor(b)) | importance_metrics(torch.tensor(a - b), TIS_CAP)
    found = sums.metrics()
    assert set(expected) <= set(found)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert found["logprob_correlation"] == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_a_hundred_thousand_lines_in_bounded_memory(tmp_path: Path) -> None:
    a, b = pair(tmp_path, 500)
    rows = [
        {"token_ids": x["token_ids"], "train_logprobs": x["logprobs"], "rollout_logprobs": y["logprobs"]}
        for x, y in zip(a, b, strict=True)
    ]
    path = tmp_path / "both.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) * 200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = meter_traces(TraceRequest(path))
    assert result.figures.tokens == 800_000
    assert result.pairing["pairs"] == 100_000
    assert result.verdict.passed
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 150 << 20, f"{grown >> 20} MiB"
