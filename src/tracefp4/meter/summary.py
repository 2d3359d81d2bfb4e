"""A meter's result in a few lines of plain text."""

from __future__ import annotations

from typing import Any

from tracefp4.meter.findings import number

SHOWN = 8


def summary(result: dict[str, Any]) -> list[str]:
    """The lines that the command prints."""
    verdict, metrics = result["verdict"], result["metrics"]
    out = ["pass" if verdict["passed"] else "fail: " + "; ".join(verdict["reasons"])]
    if metrics:
        out.append(
            f"mean |log-prob difference| {number(metrics['mismatch/logprob_abs_diff_mean'])} over {result['tokens']:,} "
            f"tokens (largest {number(metrics['mismatch/logprob_abs_diff_max'])}), KL k1 "
            f"{number(metrics['mismatch/kl_k1'])}, k3 {number(metrics['mismatch/kl_k3'])}; passes up to "
            f"{number(verdict['ceiling'])}: {verdict['ceiling_from']}"
        )
    if result["kind"] == "live":
        ratio = result["over_floor"]
        out.append(
            f"{ratio['value']:.2f} times the floor, 95 % interval {ratio['low']:.2f} to {ratio['high']:.2f}; with "
            "every "
            f"site aligned {number(result['clean'])}"
        )
        out += [f"- {cause}" for cause in result["causes"][:SHOWN]]
    else:
        for finding in result["findings"]:
            out.append(f"- {finding['title']} (confidence {finding['confidence']:.2f})")
            out += [f"    {sentence}" for sentence in finding["evidence"]]
            out.append(f"    remedy: {finding['remedy']}")
        if not result["findings"]:
            out.append("no fault was recognised")
    out += [f"note: {notice}" for notice in result["notices"][:SHOWN]]
    return out
