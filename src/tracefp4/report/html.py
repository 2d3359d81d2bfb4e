"""`tracefp4 report`: one HTML file that needs nothing but itself, and the same figures as PNG and CSV on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tracefp4.report.export import check_target, write_csv, write_export, write_pngs
from tracefp4.report.figures import FigureSection, build_sections
from tracefp4.report.findings import CHECKS, findings
from tracefp4.report.logger import ensure_dir
from tracefp4.report.overview import config_diff, origin_table, results_table
from tracefp4.report.pages import render_page
from tracefp4.report.runs import Group, group_runs, load_runs
from tracefp4.report.svg import figure_svg, swatch

REPORT = "report.html"


def report(
    paths: Sequence[str | Path],
    out: str | Path | None = None,
    png: str | Path | None = None,
    csv: str | Path | None = None,
) -> list[Path]:
    """Reads all runs in and below `paths` and writes the report; returns the files written, the page first.

    out: the page, by default report.html in the only folder of `paths`, or here if there are several. png: a folder for
    one picture a figure; csv: a file of every value. Equal runs give equal bytes. Raises TracefpError for a folder
    without a run, a broken file and a target that cannot be written; each file is then whole or untouched.
    """
    runs = load_runs(paths)
    groups = group_runs(runs)
    sections = build_sections(groups)
    page = render(groups, sections).encode("utf-8")
    target = Path(out) if out is not None else Path(paths[0] if len(paths) == 1 else ".") / REPORT

    check_target(target, (".html", ".htm"))  # all of them before the page is written: all targets or none
    if csv is not None:
        check_target(Path(csv), (".csv",))
        ensure_dir(Path(csv).parent)
    if png is not None:
        ensure_dir(Path(png))

    write_export(target, lambda file: file.write(page))
    written = [target]
    if png is not None:
        written += write_pngs(Path(png), sections, groups)
    if csv is not None:
        write_csv(Path(csv), groups)
        written.append(Path(csv))
    return written


def render(groups: Sequence[Group], sections: Sequence[FigureSection]) -> str:
    """The page. Whatever comes from the runs is escaped."""
    runs = [run for group in groups for run in group.runs]
    settings = config_diff(runs)
    links = [("look", "What to look at"), ("runs", "Runs"), *([("settings", "Settings")] if settings.rows else [])]
    links += [*((section.key, section.title) for section in sections), ("origin", "Where the numbers come from")]
    notices = [notice for run in runs for notice in run.notices] + [n for g in groups for n in _short_seeds(g)]
    return render_page(
        "report.html",
        ("tracefp4.report", "page"),
        script="plots.js",
        title=f"tracefp4 report: {', '.join(dict.fromkeys(group.label for group in groups))}",
        summary=_summary(groups),
        links=links,
        findings=findings(groups),
        checks=CHECKS,
        notices=[f"{notice}." for notice in notices],
        results=results_table(runs),
        origin=origin_table(runs),
        settings=settings,
        legend=[{"index": g.index, "label": _legend(g), "swatch": swatch(g.index)} for g in groups],
        sections=[
            {
                "key": section.key,
                "title": section.title,
                "text": section.text,
                "absent": section.absent,
                "figures": [
                    {
                        "key": figure.plot.key,
                        "title": figure.plot.title,
                        "unit": figure.plot.unit,
                        "metric": figure.plot.metric,
                        "notes": figure.notes,
                        "svg": figure_svg(figure),
                    }
                    for figure in section.figures
                ],
            }
            for section in sections
        ],
        count=f"{len(runs)} run folder{'' if len(runs) == 1 else 's'}",
    )


def _summary(groups: Sequence[Group]) -> str:
    count = sum(len(group.runs) for group in groups)
    text = f"{count} run{'' if count == 1 else 's'} of {len(groups)} setting{'' if len(groups) == 1 else 's'}."
    if any(len(group.runs) > 1 for group in groups):
        text += " Seeds of one setting: the thick line is their mean, the band their smallest and largest value."
    return text


def _short_seeds(group: Group) -> Iterator[str]:
    steps = {run.steps_done for run in group.runs}
    if len(steps) > 1:
        yield f"{group.label}: mean and band end with its shortest seed, after step {min(steps) - 1}; thin lines go on"


def _legend(group: Group) -> str:
    seeds = [str(run.seed) for run in group.runs if run.seed is not None]
    return f"{group.label}, seed{'' if len(seeds) == 1 else 's'} {', '.join(seeds)}" if seeds else group.label
