"""Tables and plots of a command: Markdown, HTML, PNG, the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table as RichTable
from rich.text import Text

from tracefp4.files import write_text_atomic
from tracefp4.methods import get_method, list_methods
from tracefp4.report import write_json_atomic
from tracefp4.report.catalog import SECTIONS
from tracefp4.report.export import write_pngs
from tracefp4.report.figures import Figure, FigureSection, build_figure
from tracefp4.report.html import report
from tracefp4.report.logger import METRICS
from tracefp4.report.pages import render_page
from tracefp4.report.runs import Group, load_run
from tracefp4.report.svg import figure_svg, swatch
from tracefp4.report.table import provenance_lines
from tracefp4.reproduce.experiments import CONTROL
from tracefp4.reproduce.plan import Plan
from tracefp4.reproduce.results import FORMS, FP4, OWN
from tracefp4.reproduce.runner import start_state
from tracefp4.reproduce.stats import COLLAPSED, HOLD, SMOOTH_STEPS, SPAN

RESULTS, MARKDOWN, PAGE, REPORT, FIGURES = "results.json", "results.md", "results.html", "report.html", "figures"
PLOTS = ("reward/mean", "mismatch/logprob_abs_diff_mean", "train/entropy", "response/length_mean")
_NONE = "-"
_FORM_NAMES = {OWN: "own form", FP4: "FP4", CONTROL: "BF16"}


def write_first_steps(plan: Plan, facts: dict[str, Any], results: dict[str, Any]) -> str:
    """Writes the Markdown of figures of the first steps beside that of all; returns its name."""
    name = f"first-{results['steps']}-steps.md"
    write_text_atomic(plan.out / name, markdown(plan, facts, results))
    return name


def write_results(plan: Plan, facts: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Writes all of them into the folder; returns the names. facts: of plan.json."""
    write_json_atomic(plan.out / RESULTS, {**facts, **results})
    write_text_atomic(plan.out / MARKDOWN, markdown(plan, facts, results))
    write_text_atomic(plan.out / PAGE, html(plan, facts, results))
    written = [RESULTS, MARKDOWN, PAGE]
    if any((spec.run_dir / METRICS).is_file() and (spec.run_dir / METRICS).stat().st_size for spec in plan.specs):
        report([plan.out], plan.out / REPORT)
        written.append(REPORT)
        for key in results["tables"]:
            groups = _groups(plan, key)
            section = FigureSection(key, "", "", _figures(groups), [])
            if section.figures:
                write_pngs(plan.out / FIGURES / key, [section], groups)
                written.append(f"{FIGURES}/{key}/")
    return written


# Tables


def verdict(table: dict[str, Any]) -> str:
    """One sentence on whether the table may be read as a comparison."""
    control = table["control"]
    if control["stable"]:
        return f"Control stable: {control['why']}."
    if control["stable"] is None:
        return f"Not yet a comparison: {control['why']}."
    return f"CONTROL UNSTABLE: {control['why']}. This comparison is not valid: its rows do not rank methods."


def table_rows(table: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, a row an arm)."""
    headings = ["mode", "steps", "mean |log p diff.|", "over bf16", f"worst {SPAN} steps", "max"]
    headings += ["codes differ", "reward, end"]
    headings += [f"score, {_FORM_NAMES[form]}" for form in FORMS]
    headings += ["own form - bf16", "FP4 - bf16's FP4", "collapse", "time a run"]
    rows = []
    for name, arm in table["arms"].items():
        mark = " (control unstable)" if name == CONTROL and table["control"]["stable"] is False else ""
        to_control = [table["differences"][form][name].get(CONTROL) for form in (OWN, FP4)]
        rows.append(
            [
                name + mark,
                _steps(arm),
                _spread(arm["diff_mean"], _short),
                _times(arm["diff_over_control"]),
                _times(arm["diff_over_control_worst"]),
                _NONE if arm["diff_max_over_seeds"] is None else _short(arm["diff_max_over_seeds"]),
                _percent(arm["code_after"] or arm["code_before"]),
                _spread(arm["reward_last"], _share),
                *(_spread(arm["scores"][form], _share) for form in FORMS),
                *map(_interval, to_control),
                _collapses(arm),
                _time(arm["seconds"]),
            ]
        )
    return headings, rows


def difference_rows(table: dict[str, Any], form: str) -> tuple[list[str], list[list[str]]]:
    """(headings, a row an arm): its score minus that of the arm of the column."""
    pairs = table["differences"][form]
    names = [name for name in pairs if pairs[name]]
    rows = [[name, *(_interval(pairs[name].get(other)) for other in names)] for name in names]
    return [f"{_FORM_NAMES[form]}: row - column", *names], rows


def caption(results: dict[str, Any]) -> str:
    """What a cell is."""
    seeds = results["seeds"]
    several = len(seeds) > 1
    error = "its standard error over seeds" if several else "its standard error over problems"
    interval = "Student's t over the differences of seeds" if several else "a bootstrap over problems"
    names = f"seed{'s' if several else ''} {', '.join(map(str, seeds))}"
    return (
        f"{names.capitalize()}; {results['steps']} steps. Figures of a run are means over its steps, max its largest "
        f"token; +- is {error}, where there is one. Over bf16: in the seeds and steps that both have; worst {SPAN} "
        "steps: in a row, in any seed. Codes differ: as the trainer's forward uses them. Scores: mean reward on "
        "held-out problems, the weights in the mode's own rollout form, in FP4, in BF16. Differences are paired by "
        f"seed and problem, with 95 % intervals from {interval}. Collapse: the first step, by seed, whose reward (mean "
        f"of {SMOOTH_STEPS} steps, of short runs a tenth) is below {COLLAPSED:g} of its best so far, or in which the "
        f"run diverged. Control: bf16 must stay at {HOLD:g} or above once it has risen to it. Time: "
        "wall-clock of steps and evaluation, by a run that shares the device with those beside it."
    )


def _steps(arm: dict[str, Any]) -> str:
    done = min((steps for steps in arm["steps"] if steps is not None), default=0)
    return f"{done}" if arm["done"] == arm["planned"] else f"{done}, {arm['done']} of {arm['planned']} done"


def _times(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}x"


def _short(value: float) -> str:
    return f"{value:.3g}"


def _share(value: float) -> str:
    return f"{value:.3f}"


def _spread(found: dict[str, Any] | None, form: Any) -> str:
    if found is None:
        return _NONE
    return form(found["mean"]) + ("" if found["se"] is None else f" +- {found['se']:.2g}")


def _percent(found: dict[str, Any] | None) -> str:
    return _NONE if found is None else f"{100 * found['mean']:.2f} %"


def _interval(pair: dict[str, Any] | None) -> str:
    return _NONE if pair is None else f"{pair['value']:+.3f} [{pair['low']:+.3f}, {pair['high']:+.3f}]"


def _collapses(arm: dict[str, Any]) -> str:
    if not any(arm["steps"]):
        return _NONE
    counted = [step for step, steps in zip(arm["collapse"], arm["steps"], strict=True) if steps is not None]
    if all(step is None for step in counted):
        return "none"
    return ", ".join("none" if step is None else str(step) for step in counted)


def _time(seconds: Sequence[float]) -> str:
    known = [s for s in seconds if s]
    return f"{sum(known) / len(known) / 60:.1f} min" if known else _NONE


def about(plan: Plan) -> list[str]:
    """What was trained from which start, a line a rung: a reader's first question."""
    lines = []
    for start, rung in plan.starts.items():
        m, s, t = rung.start.model, rung.sampling, rung.train
        lines.append(
            f"Policy: {m.num_layers} layers of width {m.hidden_size}, {m.num_experts} experts, "
            f"{m.num_experts_per_token} a token; task: {rung.task.name}; warm start {start.name}: "
            f"{start_state(start, rung)}. RL: {s.prompts_per_step} prompts x {s.samples_per_prompt} responses of at "
            f"most {s.max_new_tokens} tokens a step, {t.updates_per_rollout} updates, learning rate {t.lr:g}."
        )
    return lines


def glossary(plan: Plan) -> list[tuple[str, str]]:
    """(row, what it is), of all tables, each once."""
    known = {method.name: method.description for method in list_methods()}
    found: dict[str, str] = {}
    for arm in (arm for table in plan.experiment.tables for arm in table.arms):
        text = known.get(arm.mode) or get_method(arm.mode).description
        if arm.policy_of:
            text = f"the policy that {arm.policy_of} trained, evaluated in other formats"
        found[arm.name] = text + (
            f"; {', '.join(arm.settings or arm.evaluated)}" if arm.settings or arm.evaluated else ""
        )
    return list(found.items())


def _pairs(table: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    for form in FORMS:
        headings, rows = difference_rows(table, form)
        if len(rows) > 1:
            yield headings, rows


# Targets


def markdown(plan: Plan, facts: dict[str, Any], results: dict[str, Any]) -> str:
    """results.md."""
    parts = [f"# {plan.experiment.name}: {plan.experiment.summary}", "\n".join(f"- {line}" for line in about(plan))]
    for key, table in results["tables"].items():
        parts += [f"## {key}: {table['title']}", verdict(table)]
        for headings, rows in (table_rows(table), *_pairs(table)):
            lines = [headings, ["---"] + ["---:"] * (len(headings) - 1), *rows]
            parts.append("\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines))
        parts += [table["note"]] if table["note"] else []
    parts.append("Rows:\n\n" + "\n".join(f"- {name}: {text}" for name, text in glossary(plan)))
    parts += [caption(results), "\n".join(f"- {line}" for line in _origin(facts, results))]
    return "\n\n".join(parts) + "\n"


def html(plan: Plan, facts: dict[str, Any], results: dict[str, Any]) -> str:
    """results.html: the tables, and the plots of reward, distance, entropy and length, a curve a mode."""
    tables = []
    for key, table in results["tables"].items():
        groups = _groups(plan, key)
        tables.append(
            {
                "key": key,
                "title": table["title"],
                "verdict": verdict(table),
                "note": table["note"],
                "alarm": table["control"]["stable"] is False,
                "grid": _grid(table_rows(table)),
                "pairs": list(map(_grid, _pairs(table))),
                "legend": [{"label": group.label, "swatch": swatch(group.index)} for group in groups],
                "figures": [
                    {"title": f.plot.title, "unit": f.plot.unit, "notes": f.notes, "svg": figure_svg(f)}
                    for f in _figures(groups)
                ],
            }
        )
    return render_page(
        "page.html",
        ("tracefp4.reproduce", ""),
        "page.css",
        title=f"{plan.experiment.name}: {plan.experiment.summary}",
        about=about(plan),
        tables=tables,
        glossary=glossary(plan),
        caption=caption(results).replace("+-", "\u00b1"),
        seeds=len(plan.seeds),
        origin=_origin(facts, results),
    )


def _grid(table: tuple[list[str], list[list[str]]]) -> dict[str, Any]:
    headings, rows = table
    return {"headings": headings, "rows": [[cell.replace("+-", "\u00b1") for cell in row] for row in rows]}


def rich_tables(results: dict[str, Any]) -> Iterator[RichTable | str]:
    """For the terminal: a verdict and a table for each table."""
    for key, table in results["tables"].items():
        headings, rows = table_rows(table)
        shown = RichTable(title=Text(f"{key}: {table['title']}"), title_justify="left")
        for index, heading in enumerate(headings):
            shown.add_column(Text(heading), justify="left" if index == 0 else "right")
        for row in rows:
            shown.add_row(*map(Text, row))
        yield shown
        yield verdict(table)
        if table["note"]:
            yield table["note"]
    yield caption(results)


def _groups(plan: Plan, key: str) -> list[Group]:
    """A curve an arm that trains."""
    groups: list[Group] = []
    table = next(t for t in plan.experiment.tables if t.key == key)
    for arm in table.arms:
        specs = [s for s in plan.of_table(key) if s.arm == arm and s.trains]
        runs = [load_run(s.run_dir, s.name) for s in specs if (s.run_dir / METRICS).is_file()]
        runs = [run for run in runs if run.series]
        if runs:
            groups.append(Group(len(groups), arm.name, runs))
    return groups


def _figures(groups: Sequence[Group]) -> list[Figure]:
    plots = [plot for metric in PLOTS for section in SECTIONS for plot in section.plots if plot.metric == metric]
    return [figure for figure in (build_figure(plot, groups) for plot in plots) if figure.curves]


def _origin(facts: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Command, commit, hardware, versions, and the device time of all invocations."""
    lines = provenance_lines(facts)
    calls = results["invocations"]
    if calls:
        minutes = sum(call["seconds"] for call in calls) / 60
        jobs = ", ".join(map(str, sorted({call["jobs"] for call in calls})))
        lines.append(f"{facts['device']} time of {len(calls)} invocations together: {minutes:.1f} min; at once: {jobs}")
    if taken := results["taken_over"]:
        lines.append("runs taken over: " + "; ".join(f"{name} from {run}" for name, run in taken.items()))
    commits = {resume.get("commit") for resume in facts.get("resumes", [])} - {facts.get("commit")}
    if commits:
        lines.append(f"resumed at other commits: {', '.join(sorted(map(str, commits)))}")
    return lines
