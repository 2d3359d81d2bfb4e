"""What the rollout benchmark found: its rows, the ratios between them, and both as Markdown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracefp4.bench.clocks import Clocks


@dataclass
class Row:
    """One form at one context. bytes_step: fewest bytes of a step (weights of the chosen experts, context, head);
    bound_ms: at the measured copy bandwidth; of_bound: bound over median; parts: share of the device's time; checked:
    how far logits are from those of the kernels' references; clocks: in timed and warm-up steps."""

    form: str
    context: int
    sequences: int = 0
    weight_bytes: int = 0
    cache_bytes: int = 0
    bytes_step: int = 0
    bound_ms: float | None = None
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    device_ms: float | None = None
    tokens_per_s: float | None = None
    of_bound: float | None = None
    parts: dict[str, float] = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks)
    checked: str | None = None
    error: str | None = None
    seconds: float = 0.0


def ratios(rows: list[Row]) -> list[dict[str, Any]]:
    """FP4 over BF16 at each context, the ratio that their bytes would allow, and the share that recording takes."""
    by = {(r.form, r.context): r for r in rows if r.tokens_per_s}
    found = []
    for context in sorted({c for _, c in by}):
        base, plain = by.get(("bf16", context)), by.get(("fp4", context))
        for form in ("fp4", "fp4-recorded"):
            r = by.get((form, context))
            if r is None or base is None:
                continue
            roofline = (r.sequences / (r.bound_ms or 1.0)) / (base.sequences / (base.bound_ms or 1.0))
            measured = (r.tokens_per_s or 0.0) / (base.tokens_per_s or 1.0)
            entry: dict[str, Any] = {"context": context, "form": form, "measured": measured}
            entry |= {"roofline": roofline, "share": measured / roofline}
            if form == "fp4-recorded" and plain is not None and plain.sequences == r.sequences:
                entry["recording_share"] = 1 - (plain.median_ms or 0.0) / (r.median_ms or 1.0)
            found.append(entry)
    return found


def table(rows: list[Row]) -> str:
    """Markdown: rows, then ratios."""
    lines = [
        "| form | context | batch | check | tokens/s | median ms | quartiles | device ms | GB a step | bound ms "
        "| of bound | SM MHz, W |",
        "|---|---:|---:|---|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for r in rows:
        if r.error is not None or r.median_ms is None or r.quartiles_ms is None:
            lines.append(
                f"| {r.form} | {r.context} | {r.sequences} | FAILED: {(r.error or '').splitlines()[:1]} ||||||||"
            )
            continue
        device = "" if r.device_ms is None else f"{r.device_ms:.2f}"
        lines.append(
            f"| {r.form} | {r.context} | {r.sequences} | {r.checked} | {r.tokens_per_s:.0f} | {r.median_ms:.2f} "
            f"| {r.quartiles_ms[0]:.2f}-{r.quartiles_ms[1]:.2f} | {device} | {r.bytes_step / 1e9:.2f} "
            f"| {r.bound_ms:.2f} | {100 * (r.of_bound or 0):.0f} % | {r.clocks} |"
        )
    lines += [
        "",
        "| context | form | over BF16 | by bytes | share of it | recording |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for e in ratios(rows):
        recording = f"{100 * e['recording_share']:.1f} %" if "recording_share" in e else ""
        lines.append(
            f"| {e['context']} | {e['form']} | {e['measured']:.2f} | {e['roofline']:.2f} | {100 * e['share']:.0f} % "
            f"| {recording} |"
        )
    for r in rows:
        if r.parts:
            parts = ", ".join(f"{part} {100 * share:.0f} %" for part, share in r.parts.items())
            lines += ["", f"{r.form} at {r.context}: {parts}."]
    return "\n".join(lines)
