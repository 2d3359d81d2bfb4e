"""The result of a meter as JSON, and as one HTML file that needs nothing but itself."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup

from tracefp4.meter.findings import number, percent
from tracefp4.report.catalog import Plot
from tracefp4.report.figures import Curve, Figure
from tracefp4.report.overview import Table
from tracefp4.report.pages import render_page
from tracefp4.report.svg import HEIGHT, WIDTH, figure_svg, tag

PAGE = "meter.html"


@dataclass
class Section:
    """A heading and what stands below it. wide: cells of its tables wrap."""

    key: str
    title: str
    text: str = ""
    points: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    wide: bool = False


def to_json(result: dict[str, Any]) -> str:
    """JSON of a result; a figure that is not finite becomes null, which JSON has no number for."""
    return json.dumps(_finite(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def printable(value: Any) -> Any:
    """A result without lone surrogates, which a file's name or an id may hold and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {printable(k): printable(v) for k, v in value.items()}
    return [printable(v) for v in value] if isinstance(value, (list, tuple)) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def render(result: dict[str, Any]) -> str:
    """The page. Whatever comes from files and models is escaped."""
    live = result["kind"] == "live"
    verdict, metrics = result["verdict"], result["metrics"]
    mean = metrics.get("mismatch/logprob_abs_diff_mean", float("nan"))
    told = "; ".join(verdict["reasons"]) if verdict["reasons"] else f"mean |log-prob difference| is {number(mean)}"
    names = [result[side] for side in ("train", "rollout")] if live else [i["file"] for i in result["inputs"]]
    title = f"tracefp4 meter: {' and '.join(dict.fromkeys(map(str, names)))}"
    sections = (_live_sections(result) if live else _trace_sections(result)) + [_origin(result)]
    return render_page(
        PAGE,
        ("tracefp4.meter", "template"),
        style="meter.css",
        script="plots.js",
        title=title + (f", {result['method']}" if live else ""),
        passed=verdict["passed"],
        verdict=f"{told}. Passes up to {number(verdict['ceiling'])}: {verdict['ceiling_from']}.",
        links=[(section.key, section.title) for section in sections],
        sections=sections,
    )


# -- live ----------------------------------------------------------------------------------------------------------


def _live_sections(r: dict[str, Any]) -> list[Section]:
    ratio = r["over_floor"]
    facts = (
        f"{r['tokens']:,} sampled tokens of {r['responses']} responses, at temperature {r['temperature']:g}. The "
        "method as it "
        f"is: {number(r['full'])}, {ratio['value']:.2f} times the BF16 floor of {number(r['floor']['mean'])} (95 % "
        "interval "
        f"{ratio['low']:.2f} to {ratio['high']:.2f}). With every site aligned: {number(r['clean'])}."
    )
    sections = [Section("causes", "Largest causes", facts, points=r["causes"]), _sites(r)]
    if r["layers"]:
        sections.append(_layers(r))
    sections += [_codes(r)] if r["code_mismatch"] else []
    sections += [_experts(r)] if r["experts"] else []
    return [*sections, _metrics(r), _live_outliers(r), *_notices(r)]


_SITES_CAPTION = (
    "Removed: what the mean |log-prob difference| falls by where this site alone takes the rollout's choice, all "
    "others as the "
    "method has them. Alone: what it rises by where this site alone is left to the method, all others aligned. A "
    "site that the "
    "method aligns already is undone instead; its bars say what aligning it is worth. Negative: the site hides "
    "errors of others."
)


def _sites(r: dict[str, Any]) -> Section:
    scale = max((abs(v) for s in r["sites"] for v in (s["removed"], s["alone"])), default=1.0) or 1.0
    rows = [_bar_row(s, scale) for s in sorted(r["sites"], key=_open_first)]
    headings = ["site", "in this method", "removed", "", "alone", ""]
    notes = [f"{s['title']}: {s['note']}." for s in r["sites"] if s["note"]]
    return Section("sites", "Sites", points=notes, tables=[Table(_SITES_CAPTION, headings, rows)])


def _open_first(s: dict[str, Any]) -> tuple[bool, float]:
    return s["aligned_by_method"], -s["removed"]


def _bar_row(s: dict[str, Any], scale: float) -> list[Any]:
    state = "aligned" if s["aligned_by_method"] else "open"
    bars = [cell for key in ("removed", "alone") for cell in (_signed(s[key]), _bar(s[key] / scale))]
    return [s["title"], state, *bars]


def _layers(r: dict[str, Any]) -> Section:
    scale = max((abs(v) for s in r["layers"] for v in (s["removed"], s["alone"])), default=1.0) or 1.0
    rows = [_bar_row(s, scale) for s in r["layers"]]
    tables = [Table("All open sites of a layer, switched together.", ["layer", "", "removed", "", "alone", ""], rows)]
    sites = list(dict.fromkeys(g["site"] for g in r["grid"]))
    titles = {s["site"]: s["title"] for s in r["sites"]}
    layers = list(dict.fromkeys(g["layer"] for g in r["grid"]))
    at = {(g["site"], g["layer"]): g for g in r["grid"]}
    cells = [
        [
            titles.get(site, site),
            *(_signed(at[site, layer]["removed"]) if (site, layer) in at else "-" for layer in layers),
        ]
        for site in sites
    ]
    headings = ["removed", *("outside" if layer == -1 else f"layer {layer}" for layer in layers)]
    tables.append(Table("One site of one layer. Outside: embedding, last norm, head.", headings, cells))
    return Section("layers", "Layers", tables=tables)


def _codes(r: dict[str, Any]) -> Section:
    found: dict[tuple[str, int], dict[str, float]] = {}
    for name, value in r["code_mismatch"].items():
        rate, _, rest = name.partition("/")
        parts = rest.split("/")
        if parts[-1].startswith("layer"):
            where = (parts[-2], int(parts[-1].removeprefix("layer")))
            found.setdefault(where, {})["/".join([rate, *parts[:-2]])] = value
    columns = ("code_mismatch/before", "code_mismatch/after", "scale_mismatch/before", "d_act/before", "d_act/after")
    rows = [
        [f"{site}, layer {layer}", *(percent(v[c]) if c in v else "-" for c in columns)]
        for (site, layer), v in sorted(found.items())
    ]
    caption = (
        "Share of FP4 values whose slot differs from the rollout's, by nearest rounding (before) and as the method "
        "rounds "
        "(after); of block scales; relative distance of the rounded values."
    )
    if "router/topk_disagreement" in r["code_mismatch"]:
        caption += (
            " The trainer's own router picks other experts in "
            f"{percent(r['code_mismatch']['router/topk_disagreement'])} "
            "of the rows."
        )
    headings = ["site", "slots before", "slots after", "scales", "distance before", "distance after"]
    return Section("codes", "Slots that differ", tables=[Table(caption, headings, rows)])


def _experts(r: dict[str, Any]) -> Section:
    rows = [
        [f"layer {e['layer']}, expert {e['expert']}", percent(e["share"]), number(e["inside"]), number(e["outside"])]
        for e in r["experts"]
    ]
    caption = (
        "Tokens by the experts that the row which predicts them was sent to: mean |log-prob difference| of those an "
        "expert had a part in, and of the others; the most distant first."
    )
    return Section("experts", "Experts", tables=[Table(caption, ["expert", "tokens", "with it", "without it"], rows)])


def _live_outliers(r: dict[str, Any]) -> Section:
    rows = []
    for o in r["outliers"]:
        context = Markup("<code>{}<mark>{}</mark>{}</code>").format(o["before"], o["text"], o["after"])
        layers = "; ".join(
            f"{site}: {' '.join('-' if v is None else f'{100 * v:.0f}' for v in values)}"
            for site, values in o["code_mismatch"].items()
        )
        rows.append([context, str(o["position"]), f"{o['train']:.3f}", f"{o['rollout']:.3f}", layers or "-"])
    caption = (
        "Slots that differ: percent of each layer's values in the row that predicts the token, by nearest rounding."
    )
    headings = ["token in its context", "position", "trainer", "rollout", "slots that differ, layer by layer"]
    return Section("outliers", "Tokens farthest apart", tables=[Table(caption, headings, rows)], wide=True)


# -- traces ----------------------------------------------------------------------------------------------------------


def _trace_sections(r: dict[str, Any]) -> list[Section]:
    text = "" if r["findings"] else "No fault was recognised."
    sections = [Section("findings", "What the difference looks like", text, findings=r["findings"])]
    curves = [
        ("by_step", "step", "Over training steps", "step"),
        ("by_position", "position", "Over positions in the response", "position"),
        ("by_logprob", "logprob", "Over the trainer's log-prob", "log-prob"),
    ]
    figures = [_curve(r[key], at, title, x) for key, at, title, x in curves if len(r[key]) > 1]
    if r["tokens"]:
        figures.append(_histogram(r["histogram"]))
    sections.append(Section("plots", "Distance", figures=figures))
    sections.append(_metrics(r))
    if r["misaligned_rows"]:
        sections.append(_misaligned(r))
    if r["outliers"]:
        sections.append(_trace_outliers(r))
    return [*sections, _inputs(r), *_notices(r)]


def _curve(points: list[dict[str, float]], at: str, title: str, x: str) -> dict[str, Any]:
    plot = Plot(f"mismatch/{at}", title, "mean |log-prob difference|, nats", x=x)
    figure = Figure(plot, [Curve(1, "mean", np.array([p[at] for p in points]), np.array([p["mean"] for p in points]))])
    return {"title": title, "unit": plot.unit, "svg": figure_svg(figure)}


def _histogram(bars: list[dict[str, float]]) -> dict[str, Any]:
    """Counts of delta, A - B, over bounds that widen with its size."""
    most = max(bar["count"] for bar in bars) or 1.0
    left, bottom = 10.0, HEIGHT - 44.0
    width = (WIDTH - 2 * left) / len(bars)
    parts = [tag("title", "Histogram of the log-prob difference A - B")]
    for i, bar in enumerate(bars):
        high = (bottom - 10) * bar["count"] / most
        label = f"{bar['low']:.3g} to {bar['high']:.3g}: {bar['count']:.0f} tokens"
        shape = {"x": f"{left + i * width:.1f}", "y": f"{bottom - high:.1f}", "width": f"{max(1.0, width - 1):.1f}"}
        parts.append(tag("rect", tag("title", label), height=f"{high:.1f}", **shape))
    parts.append(tag("path", d=f"M{left} {bottom}H{WIDTH - left}", class_="axis"))
    count, quarter = len(bars), len(bars) // 4 + 1
    for at, text, anchor in (
        (1, "-10", "start"),
        (quarter, f"{bars[quarter]['low']:.1g}", "middle"),
        (count / 2, "0", "middle"),
        (count - quarter, f"{bars[count - 1 - quarter]['high']:.1g}", "middle"),
        (count - 1, "10", "end"),
    ):
        parts.append(tag("text", text, x=f"{left + at * width:.1f}", y=bottom + 19, text_anchor=anchor))
    parts.append(tag("text", "A - B, nats", x=WIDTH // 2, y=HEIGHT - 6, text_anchor="middle"))
    svg = tag("svg", *parts, class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img")
    return {"title": "Difference", "unit": "tokens, by log-prob of A - B", "svg": svg}


def _misaligned(r: dict[str, Any]) -> Section:
    rows = [
        [str(m["line_a"]), str(m["line_b"]), str(m["id"] or "-"), str(m["tokens_a"]), str(m["tokens_b"]), m["relation"]]
        for m in r["misaligned_rows"]
    ]
    counts = ", ".join(f"{name}: {count:,}" for name, count in r["pairing"]["relations"].items())
    caption = f"The first {len(rows)} rows that do not fit as paired by {r['pairing']['by']}." + (
        f" After laying rows right: {counts}." if counts else ""
    )
    headings = ["line of A", "line of B", "id", "tokens of A", "tokens of B", "how they lie"]
    return Section("misaligned", "Misaligned rows", tables=[Table(caption, headings, rows)])


def _trace_outliers(r: dict[str, Any]) -> Section:
    rows = []
    for o in r["outliers"]:
        if "text" in o:
            parts = o["text_before"], o["text"], o["text_after"]
        elif "token" in o:
            parts = (" ".join(map(str, o["before"])) + " ", str(o["token"]), " " + " ".join(map(str, o["after"])))
        else:
            parts = ("", "-", "")
        context = Markup("<code>{}<mark>{}</mark>{}</code>").format(*parts)
        lines = f"{o['line_a']}, {o['line_b']}"
        step = "-" if o["step"] is None else str(o["step"])
        rows.append([context, str(o["position"]), f"{o['train']:.3f}", f"{o['rollout']:.3f}", lines, step])
    headings = ["token in its context", "position", "A", "B", "lines of A, B", "step"]
    caption = "Token ids; --tokenizer DIR shows them as text." if not any("text" in o for o in r["outliers"]) else ""
    return Section("outliers", "Tokens farthest apart", tables=[Table(caption, headings, rows)], wide=True)


def _inputs(r: dict[str, Any]) -> Section:
    keys = ("rows", "tokens", "masked_tokens", "broken_lines", "steps")
    rows = [
        [f"{i['side']}: {i['file']}", ", ".join(f"{k} ({n:,})" for k, n in i["layouts"].items())]
        + [f"{i[key]:,}" for key in keys]
        + ["yes" if i["token_ids"] else "no"]
        for i in r["inputs"]
    ]
    headings = ["file", "layout (lines)", "rows", "tokens", "masked", "broken lines", "steps", "token ids"]
    p = r["pairing"]
    caption = (
        f"{p['pairs']:,} pairs, by {p['by']}; without a partner: {p['unmatched_a']:,} rows of A, "
        f"{p['unmatched_b']:,} of B. A is "
        "the trainer, B the rollout."
    )
    return Section("inputs", "Files", tables=[Table(caption, headings, rows)])


# -- both ----------------------------------------------------------------------------------------------------------


def _metrics(r: dict[str, Any]) -> Section:
    given = r.get("metrics_as_given") or {}
    rows = [[name, number(value), *([number(given[name])] if given else [])] for name, value in r["metrics"].items()]
    headings = ["metric", "value", *(["as given"] if given else [])]
    caption = (
        "delta = log p of the trainer - log p of the rollout, natural logarithms, over response tokens; kl_k1 and "
        "kl_k3 estimate "
        "KL(rollout || trainer); the last four are the names of other frameworks."
    )
    if given:
        caption += " As given: position by position, before rows were laid right."
    if not rows:
        return Section("metrics", "Metrics", "Nothing was compared: the positions do not belong together.")
    return Section("metrics", "Metrics", tables=[Table(caption, headings, rows)])


def _notices(r: dict[str, Any]) -> list[Section]:
    return [Section("notices", "About the input", points=[f"{n}." for n in r["notices"]])] if r["notices"] else []


def _origin(r: dict[str, Any]) -> Section:
    p = r.get("provenance", {})
    rows = [
        [str(key), ", ".join(f"{k} {v}" for k, v in value.items() if v) if isinstance(value, dict) else str(value)]
        for key, value in p.items()
    ]
    return Section(
        "origin", "Where the numbers come from", tables=[Table("", ["what", "value"], rows)] if rows else [], wide=True
    )


def _signed(value: float) -> str:
    return "0" if abs(value) < 1e-6 else f"{'+' if value > 0 else '-'}{number(abs(value))}"


def _bar(share: float) -> Markup:
    """A bar from the middle line: to the right what is gained, to the left what is lost."""
    length = min(1.0, abs(share)) * 49
    x = 50 if share >= 0 else 50 - length
    shape = tag("rect", x=f"{x:.1f}", y=1, width=f"{length:.1f}", height=8, class_="more" if share >= 0 else "less")
    line = tag("path", d="M50 0V10")
    return tag("svg", shape, line, class_="bar", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")
