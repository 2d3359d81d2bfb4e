"""The command line, with a made-up loop behind it: what it calls, and one sentence per mistake."""

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

import tracefp4
from tracefp4.cli import main, parse_seeds
from tracefp4.config import ConfigError, StrictModel
from tracefp4.errors import TracefpError
from tracefp4.report import RunLogger
from tracefp4.signals import Stopped


class MethodSection(StrictModel):
    name: str = "bf16"


class RunSection(StrictModel):
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=2, ge=1)
    asynchronous: bool = False


class FakeConfig(StrictModel):
    method: MethodSection = MethodSection()
    run: RunSection = RunSection()


class FakeLoop(types.ModuleType):
    """Stands in for tracefp4.loop; `fail` is raised by the next training, `refuse` by the check before it."""

    RunConfig = FakeConfig

    def __init__(self) -> None:
        super().__init__("tracefp4.loop")
        self.calls: list[tuple[FakeConfig, Path]] = []
        self.resumed: list[bool] = []
        self.fail: BaseException | None = None
        self.checked: list[tuple[list[tuple[str, int, str]], bool]] = []
        self.refuse: TracefpError | None = None

    def check_start(self, planned: list[tuple[FakeConfig, Path]], resume: bool = False) -> None:
        self.checked.append(([(config.method.name, config.run.seed, str(path)) for config, path in planned], resume))
        if self.refuse is not None:
            raise self.refuse

    def run_training(self, config: FakeConfig, run_dir: Path, resume: bool = False) -> dict[str, Any]:
        self.calls.append((config, run_dir))
        self.resumed.append(resume)
        with RunLogger(run_dir, tensorboard=False) as logger:
            for step in range(config.run.steps):
                logger.log(step, {"reward/mean": 0.5})
        if self.fail is not None:
            raise self.fail
        return {"reward": 0.5}


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeLoop:
    fake = FakeLoop()
    for name in ("tracefp4.loop", "tracefp4.loop.config"):
        monkeypatch.setitem(sys.modules, name, fake)
    monkeypatch.chdir(tmp_path)
    Path("r.toml").write_text('[method]\nname = "trace"\n')
    return fake


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_train_once(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "r.toml", "run.seed=7", "run.steps=1", "--out", "out") == 0
    assert loop.calls == [
        (FakeConfig(method=MethodSection(name="trace"), run=RunSection(seed=7, steps=1)), Path("out"))
    ]
    assert json.loads(Path("out/config.json").read_text())["run"] == {
        "asynchronous": False,
        "seed": 7,
        "steps": 1,
    }
    assert json.loads(Path("out/final.json").read_text()) == {"reward": 0.5}
    assert capsys.readouterr().out.startswith("out: done in ")


def test_train_several_seeds_and_options_anywhere(loop: FakeLoop) -> None:
    assert run("train", "--seeds", "2,0", "--out", "out", "r.toml", "run.steps=3") == 0
    assert [(config.run.seed, str(folder)) for config, folder in loop.calls] == [
        (2, "out/seed2"),
        (0, "out/seed0"),
    ]
    assert run("train", "r.toml", "--out", "one", "--seeds", "4") == 0
    assert loop.calls[-1][1] == Path("one/seed4")


def test_the_loops_own_final_summary_stays(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def writes_final(config: FakeConfig, run_dir: Path, resume: bool = False) -> dict[str, Any]:
        (run_dir / "final.json").write_text('{"own": 1}')
        return {"reward": 0.5}

    monkeypatch.setattr(loop, "run_training", writes_final)
    assert run("train", "r.toml", "--out", "out") == 0
    assert Path("out/final.json").read_text() == '{"own": 1}'


def test_overwrite(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "r.toml", "--out", "out") == 0
    assert run("train", "r.toml", "--out", "out") == 2
    assert capsys.readouterr().err == (
        "error: the run folder out is not empty, it holds a run: go on with it by --resume, choose another with --out, "
        "or pass --overwrite to replace it\n"
    )
    assert run("train", "r.toml", "--out", "out", "--overwrite") == 0
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2


def test_a_run_without_a_step_leaves_its_folder_free(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_model(config: FakeConfig, run_dir: Path, resume: bool = False) -> dict[str, Any]:
        raise TracefpError("model.path is no checkpoint")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_training", no_model)
        assert run("train", "r.toml", "--out", "out") == 2
        assert list(Path("out").iterdir()) == []
    loop.fail = TracefpError("the store is full")
    assert run("train", "r.toml", "--out", "out") == 2
    assert Path("out/metrics.jsonl").read_text().count("\n") == 2  # steps are kept


def test_resume_without_a_state_starts_anew(loop: FakeLoop) -> None:
    Path("out").mkdir()
    Path("out/metrics.jsonl").write_text('{"step": 0}\n')
    assert run("train", "r.toml", "--out", "out", "--resume") == 0
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 2
    assert loop.resumed == [True]


@pytest.mark.parametrize("command", ["train", "compare"])
def test_resume_and_overwrite_contradict(loop: FakeLoop, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "r.toml", "--out", "out", "--resume", "--overwrite") == 2
    assert "--resume goes on with a run and --overwrite removes it" in capsys.readouterr().err
    assert loop.calls == []


def test_no_seed_starts_if_one_folder_is_taken(loop: FakeLoop) -> None:
    Path("out/seed1").mkdir(parents=True)
    Path("out/seed1/metrics.jsonl").write_text("{}\n")
    assert run("train", "r.toml", "--out", "out", "--seeds", "0,1") == 2
    assert loop.calls == []


MISTAKES = [
    (["train", "x.toml", "--out", "out"], "there is no recipe at x.toml; did you mean r.toml?"),
    (
        ["train", "no/x.toml", "--out", "out"],
        "there is no recipe at no/x.toml (the folder no does not exist either)",
    ),
    (["train", "bad.toml", "--out", "out"], "bad.toml is not valid TOML: line 2, column 4: invalid value"),
    (
        ["train", "r.toml", "run.sede=1", "--out", "out"],
        "unknown key run.sede in the override 'run.sede=1'; did you",
    ),
    (
        ["train", "r.toml", "seed=1", "--out", "out"],
        "unknown key seed in the override 'seed=1'; it exists as run.",
    ),
    (["train", "r.toml", "run.seed", "--out", "out"], "the override 'run.seed' has no '='"),
    (
        ["train", "r.toml", "run.seed=x", "--out", "out"],
        'run.seed must be an integer, got "x" in the override',
    ),
    (
        ["train", "r.toml", "run.steps=0", "--out", "out"],
        "run.steps must be at least 1, got 0 in the override",
    ),
    (["train", "r.toml", "--out", "out", "--seeds", "0,a"], "--seeds must be whole numbers joined by commas"),
    (["train", "r.toml", "--out", "out", "--seeds", ""], "--seeds must be whole numbers joined by commas"),
    (["train", "r.toml", "--out", "out", "--seeds", "-1"], "--seeds must be whole numbers joined by commas"),
    (["train", "r.toml", "--out", "out", "--seeds", "1,1"], "--seeds names 1 twice"),
    (
        ["train", "r.toml", "run.seed=1", "--out", "o", "--seeds", "0"],
        "both --seeds and an override set run.seed",
    ),
    (["train", "r.toml", "--out", "r.toml"], "the folder r.toml cannot be made: a file is in its place"),
    (
        ["train", "r.toml", "--out", ".", "--overwrite"],
        "--out is empty or the current folder: name a folder of its own for the run",
    ),
    (["train", "r.toml"], "Missing option '--out'"),
    (["train", "--out", "out"], "Missing argument 'RECIPE'"),
    (["train", "r.toml", "--out", "out", "--sedes", "1"], "No such option: --sedes"),
    (["tran", "r.toml"], "No such command 'tran'"),
    (["compare", "x.toml", "--out", "out"], "there is no recipe at x.toml; did you mean r.toml?"),
    (["compare", "r.toml", "--out", "out", "--modes", ","], "--modes names nothing to run"),
    (["compare", "r.toml", "--out", "out", "--modes", "a,a"], "--modes names a twice"),
    (["compare", "r.toml", "--out", "out", "--jobs", "0"], "--jobs must be at least 1, got 0"),
    (["compare", "r.toml", "--out", "out", "--jobs", "two"], "Invalid value for '--jobs'"),
    (
        ["compare", "r.toml", "method.name=qat", "--out", "out"],
        "the override 'method.name=qat' contradicts --modes",
    ),
    (
        ["compare", "r.toml", "run.steps=0", "--out", "out"],
        "run.steps must be at least 1, got 0 in the override",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "help_for"),
    [
        (["eval", "r.toml"], "tracefp4 eval --help shows the options"),
        (["guidance", "verify"], "tracefp4 guidance verify --help shows the options"),
        (["guidance", "verfy", "x"], "tracefp4 guidance --help shows the commands"),
        (["tran", "r.toml"], "tracefp4 --help shows the commands"),
    ],
)
def test_what_cannot_be_read_names_the_help_that_has_it(
    arguments: list[str], help_for: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f" ({help_for})\n")


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_one_sentence_per_mistake(
    loop: FakeLoop, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bad.toml").write_text("a=1\nb =\n")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {sentence}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert loop.calls == []


def test_errors_of_the_package_are_sentences_and_others_keep_their_traceback(
    loop: FakeLoop, capsys: pytest.CaptureFixture[str]
) -> None:
    class RecordError(TracefpError):
        exit_code = 5

    loop.fail = RecordError("the record\nis torn")
    assert run("train", "r.toml", "--out", "a") == 5
    assert capsys.readouterr().err == "error: the record is torn\n"

    from tracefp4.formats import FormatError
    from tracefp4.guidance import GuidanceError

    for number, error in enumerate((FormatError("no such format"), GuidanceError("no such bits"))):
        loop.fail = error
        assert run("train", "r.toml", "--out", f"user{number}") == 2
        assert capsys.readouterr().err == f"error: {error}\n"

    loop.fail = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        main(["train", "r.toml", "--out", "b"])


def test_ctrl_c_is_one_line(loop: FakeLoop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.fail = KeyboardInterrupt()
    assert run("train", "r.toml", "--out", "out") == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_compare_passes_its_arguments_on(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("tracefp4.compare.compare", lambda *args, **kwargs: calls.append((args, kwargs)))
    assert run("compare", "r.toml", "run.steps=3", "--modes", "bf16, qat", "--seeds", "0,5", "--out", "o") == 0
    assert run("compare", "r.toml", "--out", "o", "--jobs", "3", "--overwrite") == 0
    assert calls == [
        (
            ("r.toml", ["bf16", "qat"], [0, 5], Path("o"), ["run.steps=3"], None),
            {"overwrite": False, "resume": False, "steps": 3},
        ),
        (
            ("r.toml", ["bf16", "naive", "qat", "trace", "trace-all"], [0, 1, 2], Path("o"), [], 3),
            {"overwrite": True, "resume": False, "steps": 2},
        ),
    ]
    assert loop.checked[0] == ([(m, s, f"o/{m}/seed{s}") for m in ("bf16", "qat") for s in (0, 5)], False)
    assert len(loop.checked[1][0]) == 15


def test_compare_resumes_the_modes_and_seeds_of_its_folder(loop: FakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("tracefp4.compare.compare", lambda *args, **kwargs: calls.append((args, kwargs)))
    Path("o").mkdir()
    Path("o/compare.json").write_text('{"modes": ["qat", "bf16"], "seeds": [4]}')
    assert run("compare", "r.toml", "--out", "o", "--resume") == 0
    assert run("compare", "r.toml", "--out", "o", "--resume", "--seeds", "4,5") == 0
    assert [args[1:3] for args, _ in calls] == [(["qat", "bf16"], [4]), (["qat", "bf16"], [4, 5])]
    assert loop.checked[0] == ([("qat", 4, "o/qat/seed4"), ("bf16", 4, "o/bf16/seed4")], True)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_refused_start_leaves_no_folder(
    loop: FakeLoop, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tracefp4.compare.train_command", lambda *_: pytest.fail("a child was started"))
    loop.refuse = TracefpError("the tokenizer is broken")
    assert run(command, "r.toml", "--out", "out") == 2
    assert capsys.readouterr().err == "error: the tokenizer is broken\n"
    assert not Path("out").exists()
    assert loop.calls == []


def test_stopped_comparison_says_how_to_go_on(
    loop: FakeLoop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Stopped(signal.SIGTERM)

    monkeypatch.setattr("tracefp4.compare.compare", stopped)
    assert run("compare", "r.toml", "run.steps=3", "--out", "o", "--modes", "bf16", "--seeds", "0,1") == 143
    assert capsys.readouterr().err == (
        "stopped by SIGTERM; go on with: "
        "tracefp4 compare r.toml run.steps=3 --out o --modes bf16 --seeds 0,1 --resume\n"
    )


def test_methods_are_listed_one_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {"bf16": "the ceiling", "trace-all": "guided everywhere"}
    known = [types.SimpleNamespace(name=name, description=line) for name, line in lines.items()]
    fake = types.ModuleType("tracefp4.methods")
    fake.list_methods = lambda: known  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tracefp4.methods", fake)
    assert run("methods") == 0
    assert capsys.readouterr().out == "bf16       the ceiling\ntrace-all  guided everywhere\n"


def test_warmstart_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fake = types.ModuleType("tracefp4.train.warmstart")
    fake.main = lambda arguments: calls.append(arguments) or 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tracefp4.train.warmstart", fake)
    monkeypatch.setattr("tracefp4.train.warmstart", fake, raising=False)
    assert run("warmstart", "w.toml", "dir") == 2
    assert calls == [["w.toml", "dir"]]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tracefp4 {tracefp4.__version__}\n"
    for arguments in ([], ["--help"]):
        assert run(*arguments) in (0, 2)
        assert "compare" in capsys.readouterr().out


def test_seeds() -> None:
    assert parse_seeds("0, 1,2") == [0, 1, 2]
    for text in ("", "a", "1.5", "-1", "0,", "\u0661"):
        with pytest.raises(ConfigError):
            parse_seeds(text)


def test_as_a_module_without_the_heavy_imports() -> None:
    code = "import sys, tracefp4.cli; print('torch' in sys.modules)"
    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy.stdout == "False\n"
    done = subprocess.run([sys.executable, "-m", "tracefp4", "tran"], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith("error: No such command 'tran'")
