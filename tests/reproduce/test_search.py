"""Short runs of a control under variants of a rung."""

import json
from pathlib import Path

import pytest

from made_up_runs import MADE, RUN, script
from tracefp4.cli import main
from tracefp4.config import ConfigError
from tracefp4.reproduce import plan as plan_module
from tracefp4.reproduce.plan import Spec, warm_start, write_recipe
from tracefp4.reproduce.search import _two, make_search, make_variants, marks, open_search

COLLAPSES = RUN.replace("min(1.0, 0.3 + step / 10)", "0.9 if step < 20 else 0.1")


def test_variants_are_all_combinations() -> None:
    found = make_variants(
        ["train.lr=1e-4,5e-5", "start.stop.pass_rate_low=0.1 start.stop.pass_rate_high=0.2; run.lag=1"]
    )
    assert [variant.label for variant in found] == [
        "lr=1e-4 pass_rate_low=0.1 pass_rate_high=0.2",
        "lr=1e-4 lag=1",
        "lr=5e-5 pass_rate_low=0.1 pass_rate_high=0.2",
        "lr=5e-5 lag=1",
    ]
    assert found[1].settings == ("train.lr=1e-4", "run.lag=1")
    assert found[1].folder == "lr-1e-4-lag-1"
    assert [variant.label for variant in make_variants([])] == ["recipe"]
    for entry, message in (
        ("train.lr", "--vary takes KEY=A,B or 'KEY=A KEY2=B; KEY=C KEY2=D', got 'train.lr'"),
        ("train.lr=", "--vary takes"),
        ("a=1 b; c=2", "--vary takes"),
        ("train.lr=1e-4,1e-4", "--vary names the variant lr-1e-4 twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_variants([entry])
    assert marks(100) == (25, 50, 100)


def test_a_reward_loses_no_digit() -> None:
    assert [_two(v) for v in (0.5, -0.25, 1.0, 10.0, 20.5, None)] == [".50", "-.25", "1.00", "10.00", "20.50", "-"]


def test_a_variant_of_the_start_has_its_own(tmp_path: Path) -> None:
    variants = make_variants(["start.stop.pass_rate_high=0.9,1", "train.lr=1e-3,1e-4"])
    plan = make_search("ladder-6", variants, tmp_path / "s", modes=("bf16", "naive"), seeds=(0, 1), tiny=True)
    assert len(plan.specs) == 4 * 2 * 2
    assert len(plan.starts) == 2
    assert {spec.start for spec in plan.specs[:4]} <= set(plan.starts)
    words = plan.specs[0].command()
    assert "eval" not in words
    assert words[-1] == "--resume"
    for settings, modes, message in (
        (["run.steps=3"], ("bf16",), "contradicts --steps"),
        (["train.lrr=3"], ("bf16",), r"unknown key train\.lrr"),
        ([], ("bf61",), "there is no mode 'bf61'"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_search("ladder-6", variants, tmp_path / "s", modes=modes, settings=settings, tiny=True)
    assert list(tmp_path.iterdir()) == []


def test_every_variant_is_trained_by_its_own_settings(tmp_path: Path) -> None:
    """Also where all go on from one start, which knows nothing of them."""
    variants = make_variants(["train.lr=1e-3,1e-4", "train.updates_per_rollout=1,2"])
    plan = make_search("ladder-6", variants, tmp_path / "s", tiny=True, settings=["train.clip_high=0.3"])
    assert len(plan.starts) == 1
    open_search(plan)
    found = {path.stem: json.loads(path.read_text())["train"] for path in (plan.out / "recipes").iterdir()}
    assert {key: (of["lr"], of["updates_per_rollout"], of["clip_high"]) for key, of in found.items()} == {
        f"lr-{lr}-updates_per_rollout-{updates}": (float(lr), updates, 0.3)
        for lr in ("1e-3", "1e-4")
        for updates in (1, 2)
    }
    assert len({spec.config for spec in plan.specs}) == 4


def test_a_run_by_other_settings_than_its_row_is_not_begun(tmp_path: Path) -> None:
    plan = make_search("ladder-6", make_variants(["train.lr=1e-3,1e-4"]), tmp_path / "s", tiny=True)
    rung, start = warm_start("ladder-6", plan.out, True, ("train.lr=1e-4",))
    with pytest.raises(AssertionError, match="lr-1e-3/bf16, seed 0 would be trained by other settings"):
        write_recipe(plan, plan.experiment.tables[0], rung.recipe(str(start)))
    assert not plan.out.exists()


def test_a_line_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "s"
    vary = ["train.lr=1e-3,1e-4"]
    for start in make_search("ladder-6", make_variants(vary), out, tiny=True).starts:
        start.mkdir(parents=True)
        (start / "warmstart.json").write_text(MADE)

    def command(spec: Spec) -> list[str]:
        return script(spec, COLLAPSES if "1e-4" in spec.table.title else RUN, 0.0)

    monkeypatch.setattr(plan_module.Spec, "command", command)
    words = [
        "reproduce",
        "search",
        "ladder-6",
        "--profile",
        "tiny",
        "--vary",
        *vary,
        "--steps",
        "40",
        "--out",
        str(out),
    ]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    headings, good, bad = capsys.readouterr().out.splitlines()
    assert headings.split()[:8] == ["variant", "mode", "steps", "start", "first", "@10", "@20", "@40"]
    assert good.split()[:8] == ["lr=1e-3", "bf16", "40", ".31", ".45", ".97", "1.00", "1.00"]
    assert "1.00 from" not in bad
    assert "0.90" not in good
    assert "collapsed at" in bad
    assert good.endswith("2.00 (1.50, 0.50)")
    with pytest.raises(SystemExit) as caught:
        main([*words, "--max-minutes", "0"])  # the table alone
    assert caught.value.code == 0
    assert capsys.readouterr().out.splitlines() == [headings, good, bad]
    with pytest.raises(SystemExit) as caught:
        main(["reproduce", "table", str(out)])
    assert caught.value.code == 2
    assert f"{out} is a search: its command with --max-minutes 0 prints its table again" in capsys.readouterr().err
