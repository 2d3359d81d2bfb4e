"""Curves, axes, findings: the numbers behind the pictures."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest

from report.runfolders import write_comparison, write_run
from tracefp4.methods import list_methods
from tracefp4.report import catalog
from tracefp4.report.axes import linear_axis, log_axis, number
from tracefp4.report.catalog import Plot
from tracefp4.report.figures import (
    MAX_POINTS,
    Figure,
    build_figure,
    build_sections,
    common_steps,
    downsample,
    running_mean,
)
from tracefp4.report.findings import findings
from tracefp4.report.overview import config_diff, origin_table, over_baseline, results_table, wilson
from tracefp4.report.runs import Group, Series, group_runs, load_runs
from tracefp4.report.svg import figure_svg

REWARD = Plot("reward/mean", "Reward", "share")


def groups_of(path: Path) -> list[Group]:
    return group_runs(load_runs([path]))


def test_downsampling_keeps_every_extreme() -> None:
    y = np.sin(np.arange(100_000) / 900.0)
    y[54_321], y[12_345] = 50.0, -50.0
    x, kept = downsample(np.arange(100_000), y, MAX_POINTS, "both")
    assert len(x) <= MAX_POINTS
    assert (np.diff(x) > 0).all()
    assert kept.max() == 50.0
    assert x[kept.argmax()] == 54_321
    assert kept.min() == -50.0
    assert (x[0], x[-1]) == (0, 99_999)
    assert (y[x.astype(int)] == kept).all()


def test_downsampling_keeps_short_curves_and_gaps() -> None:
    x, y = downsample(np.arange(5), np.array([1, np.nan, 3, 4, 5.0]), MAX_POINTS, "both")
    assert x.tolist() == [0, 1, 2, 3, 4]
    assert np.isnan(y[1])
    values = np.ones(10_000)
    values[4000:6000] = np.nan
    _, y = downsample(np.arange(10_000), values, 100, "both")
    assert np.isnan(y).any()
    assert np.nanmax(y) == 1


def test_running_mean() -> None:
    series = Series(np.arange(5), np.array([0.0, 3.0, np.nan, 6.0, 9.0]))
    assert running_mean(series, 3).values.tolist()[:2] == [1.5, 1.5]
    assert math.isnan(running_mean(series, 3).values[2])
    assert running_mean(series, 3).values.tolist()[3:] == [7.5, 7.5]
    assert running_mean(series, 0) is series


def test_mean_is_over_steps_that_all_seeds_have() -> None:
    one = Series(np.array([0, 1, 2, 3]), np.array([1.0, np.nan, 3.0, 4.0]))
    two = Series(np.array([0, 1, 2]), np.array([3.0, 1.0, 5.0]))
    steps, values = common_steps([one, two])
    assert steps.tolist() == [0, 2]
    assert values.tolist() == [[1.0, 3.0], [3.0, 5.0]]


def test_a_group_of_seeds_has_mean_band_and_thin_lines(tmp_path: Path) -> None:
    write_run(tmp_path / "seed0", seed=0)
    write_run(tmp_path / "seed1", seed=1, steps=4, planned=6)
    figure = build_figure(REWARD, groups_of(tmp_path))
    assert [(curve.label, curve.thin) for curve in figure.curves] == [
        ("trace, seed 0", True),
        ("trace, seed 1", True),
        ("trace, mean of 2 seeds", False),
    ]
    assert figure.curves[2].x.tolist() == [0, 1, 2, 3]
    assert figure.curves[2].y.tolist() == pytest.approx([0.31, 0.32, 0.33, 0.34])
    assert figure.bands[0].low.tolist() == pytest.approx([0.30, 0.31, 0.32, 0.33])
    assert figure.bands[0].high.tolist() == pytest.approx([0.32, 0.33, 0.34, 0.35])
    assert figure.notes == []


def test_long_runs_say_what_is_drawn(tmp_path: Path) -> None:
    lines = "".join(f'{{"reward/mean": {step % 7}, "step": {step}}}\n' for step in range(20_000))
    (tmp_path / "metrics.jsonl").write_text(lines)
    figure = build_figure(REWARD, groups_of(tmp_path))
    assert all(len(curve.x) <= MAX_POINTS for curve in figure.curves)
    assert figure.notes == [
        "Bold: running mean over 400 steps; thin: every step.",
        "20,000 steps, drawn by the smallest and the largest value of each of 499 stretches.",
    ]
    assert len(figure_svg(figure)) < 60_000


def test_pass_rates_of_the_ends_and_between(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", change={2: {"eval/pass_rate": 0.5}})
    figure = build_figure(Plot("eval/pass_rate", "Pass rate", "", x="steps done"), groups_of(tmp_path))
    assert list(zip(figure.curves[0].x, figure.curves[0].y, strict=True)) == [(0, 0.3), (3, 0.5), (6, 0.6)]


def test_layers_are_an_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", change={s: {"code_mismatch/after/key/layer1": s} for s in range(8)}, steps=8)
    figure = build_figure(Plot("code_mismatch/after/key", "", "", x="layer"), groups_of(tmp_path))
    assert figure.curves[0].x.tolist() == [0, 1, 2]
    assert figure.curves[0].y[1] == 6.5  # the last quarter: steps 6 and 7


def test_what_is_absent_is_said_with_the_reason(tmp_path: Path) -> None:
    for method in ("bf16", "naive"):
        write_run(tmp_path / method / "seed0", method, config={"run": {"eval_prompts": 0}})
        (tmp_path / method / "seed0" / "final.json").unlink()
    sections = build_sections(groups_of(tmp_path))
    absent = [line for section in sections for line in section.absent]
    assert "Held-out pass rate (eval/pass_rate): not logged: run.eval_prompts is 0 (bf16, naive)." in absent
    after = "the rollout is not quantized (bf16); the trainer does not round (naive)."
    assert f"Codes that differ, after (code_mismatch/after): not logged: {after}" in absent
    share = "not logged: the rollout is not quantized (bf16); no guidance is recorded (naive)."
    assert f"Guided rows (guidance/guided_share): {share}" in absent
    assert "Policy loss (train/loss): not logged: not in metrics.jsonl (bf16, naive)." in absent
    assert "0 at every step of every run that logs it: Staleness (policy/lag)." in absent
    drawn = {figure.plot.metric: figure for section in sections for figure in section.figures}
    assert drawn["code_mismatch/before"].notes == ["Not logged: the rollout is not quantized (bf16)."]
    assert "rollout_corr/kl" not in drawn


def test_null_only_and_zero_on_a_log_axis(tmp_path: Path) -> None:
    lines = [f'{{"train/loss": null, "train/grad_norm": {step - 1}, "step": {step}}}' for step in range(4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    sections = {section.key: section for section in build_sections(groups_of(tmp_path))}["optimization"]
    assert "Policy loss (train/loss): every logged value is null." in sections.absent
    [norm] = [figure for figure in sections.figures if figure.plot.metric == "train/grad_norm"]
    assert norm.notes == ["2 values of 0 or less have no place on a log axis."]
    assert np.isnan(norm.curves[0].y[:2]).all()


def test_methods_the_catalog_names_are_what_it_says() -> None:
    known = {method.name: method for method in list_methods()}
    assert all(not known[name].quantized for name in catalog.NOT_QUANTIZED)
    assert all(known[name].quantized and known[name].guidance is None for name in catalog.NOT_GUIDED)
    assert all(not known[name].forward.activations for name in catalog.NOT_ROUNDED)


def test_unknown_metrics_are_plotted_too(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", change={0: {"my own/μ": 1.0, "my-own/μ": 2.0}})
    other = build_sections(groups_of(tmp_path))[-1]
    assert (other.key, [figure.plot.metric for figure in other.figures]) == ("other", ["my own/μ", "my-own/μ"])
    assert len({figure.plot.key for figure in other.figures}) == 2


@pytest.mark.parametrize(
    "values", [[0.0], [1.0], [-3.0, -3.0], [1e-300], [1e299, -1e299], [0.1, 0.1000001], [59], [7e-8, 9e-8], [1e5, 2e5]]
)
@pytest.mark.parametrize("options", [{}, {"zero": True}, {"share": True}])
def test_linear_axes_hold_their_values(values: list[float], options: dict[str, bool]) -> None:
    axis = linear_axis(np.array(values), **options)
    placed = axis.place(np.array(values))
    assert np.isfinite(placed).all()
    assert (placed >= -1e-6).all()
    assert (placed <= 1 + 1e-6).all()
    assert axis.low < axis.high
    if max(map(abs, values)) < 1e9:
        assert 2 <= len(axis.ticks) <= 12
        assert len(set(axis.labels)) == len(axis.labels)


@pytest.mark.parametrize("values", [[0], [7], [0, 1], [0, 59], [3, 47], [0, 99_999], [0, 10**9]])
def test_step_axes_have_whole_ticks(values: list[float]) -> None:
    axis = linear_axis(np.array(values, dtype=float), whole=True)
    assert (axis.low, axis.high) == (values[0], max(values[-1], values[0] + 1))
    assert all(tick == round(tick) for tick in axis.ticks)
    assert 2 <= len(set(axis.labels)) == len(axis.ticks) <= 8


@pytest.mark.parametrize("values", [[1.0], [0.01], [0.0013, 0.0031], [1e-8, 0.2], [1e-290, 1e290], [3e-5, 3e-4]])
def test_log_axes_hold_their_values(values: list[float]) -> None:
    axis = log_axis(np.array(values))
    placed = axis.place(np.array(values))
    assert (placed >= -1e-6).all()
    assert (placed <= 1 + 1e-6).all()
    assert 2 <= len(axis.ticks) <= 8


def test_a_share_does_not_pass_one() -> None:
    assert linear_axis(np.array([0.9975, 1.0]), share=True).high == 1.0
    assert linear_axis(np.array([0.4, 1.2]), share=True).high > 1


def test_numbers() -> None:
    assert [number(v) for v in (0, 0.001234, 1.5e-5, 12.34, 1234, 120_000, -2e7)] == [
        "0",
        "0.00123",
        "1.5e-5",
        "12.3",
        "1234",
        "120k",
        "-2e7",
    ]


def test_before_and_after_have_one_axis(tmp_path: Path) -> None:
    write_run(tmp_path / "mine", change={s: {"code_mismatch/after": 0.001} for s in range(6)})
    figures: dict[str, Figure] = {
        figure.plot.metric: figure for section in build_sections(groups_of(tmp_path)) for figure in section.figures
    }
    before, after = figures["code_mismatch/before"], figures["code_mismatch/after"]
    assert before.extent == after.extent
    assert f'data-y="{0.0!r} ' in figure_svg(after)


def test_findings_name_what_is_wrong(tmp_path: Path) -> None:
    change = {step: {"mismatch/logprob_abs_diff_mean": 0.02} for step in range(20, 40)}
    change[7] = {"guidance/guided_share": 0.9, "guidance/fallback/stale": 40.0, "train/grad_norm": 30.0}
    change[8] = {"train/loss": math.nan}
    change |= {s: change[s] | {"response/truncated_share": 0.4, "train/entropy": 0.001} for s in range(30, 40)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        write_run(tmp_path / "mine", steps=40, planned=50, change=change)
    found = findings(groups_of(tmp_path))
    name = "mine"
    assert found[0] == f"{name}: stands at step 40 of 50: still running, or stopped."
    assert found[1] == f"{name}: NaN or infinite values, logged as null, in train/loss; the first at step 8."
    assert found[2] == (
        f"{name}: mean |log-prob difference| rose above 3x its start (0.00152) at step 22; highest 0.02, 13.1x."
    )
    assert found[3] == (
        f"{name}: guided share below 1 in 1 of 40 steps, lowest 0.900 at step 7; fallback by reason: stale 40 rows."
    )
    assert found[4].startswith(f"{name}: entropy fell from 0.2")
    assert found[5] == (
        f"{name}: 40 % of responses were cut off at the length limit (sampling.max_new_tokens 80), in the last quarter."
    )
    assert found[6].startswith(f"{name}: gradient norm 30 at step 7, ")
    assert found[7].startswith("Of ")
    assert len(found) == 8


def test_findings_of_healthy_runs_are_results_only(tmp_path: Path) -> None:
    write_comparison(tmp_path / "cmp", steps=8)
    found = findings(groups_of(tmp_path))
    assert found[0] == "cmp/trace/seed1: stands at step 4 of 8: still running, or stopped."
    assert found[1] == (
        "bf16: pass rate 0.300 → 0.600 (mean of 2 seeds) on 100 held-out problems: up beyond sampling noise in 2 of 2."
    )
    assert "qat: mean |log-prob difference| of the last quarter is 9.00x bf16's." in found
    assert not any("rose above" in text or "guided share" in text for text in found)


def test_runs_of_differing_commits_are_said(tmp_path: Path) -> None:
    for i, commit in enumerate(("aaa", "bbb-dirty")):
        folder = write_run(tmp_path / f"seed{i}", seed=i)
        (folder / "run.json").write_text(f'{{"commit": "{commit}", "method": "trace", "seed": {i}}}')
    found = findings(groups_of(tmp_path))
    assert "The runs are of 2 different commits (aaa, bbb-dirty): part of a difference may come from there." in found
    assert f"Run from a checkout with uncommitted changes: {tmp_path.name}/seed1." in found


def test_tables(tmp_path: Path) -> None:
    runs = load_runs([write_comparison(tmp_path / "cmp", steps=8)])
    rows = {row[0]: row for row in results_table(runs).rows}
    assert rows["cmp/qat/seed1"][1:4] == ["qat", "1", "8/8"]
    assert rows["cmp/qat/seed1"][4] == "0.300 [0.219, 0.396] → 0.600 [0.502, 0.691], n = 100"
    assert rows["cmp/qat/seed1"][6] == "9.00x"
    assert rows["cmp/trace/seed1"][3:5] == ["4/8, unfinished", "-"]
    assert rows["cmp/trace/seed1"][6] == "-"  # half a run is not compared with a whole one
    assert config_diff(runs).rows == [
        ["method.name", *(f'"{m}"' for m in ("bf16", "bf16", "qat", "qat", "trace", "trace"))],
        ["run.seed", *"010101"],
    ]
    assert origin_table(runs).rows[0] == [
        "cmp/bf16/seed0",
        "0123456789ab",
        "python 3.11, torch 2.13",
        "A CPU, 2 cores",
        "4a17",
        "c0ff",
        "tracefp4 train mine.toml",
    ]


def test_a_baseline_of_other_settings_is_none(tmp_path: Path) -> None:
    write_run(tmp_path / "bf16", "bf16", config={"train": {"lr": 1.0}})
    write_run(tmp_path / "trace", "trace", config={"train": {"lr": 2.0}})
    runs = load_runs([tmp_path])
    assert [over_baseline(run, runs) for run in runs] == [1.0, None]


def test_wilson() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(1.0, 10)[1] == 1.0
