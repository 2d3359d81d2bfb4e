"""The engine's figures as they are logged; runs without verl."""

from __future__ import annotations

from typing import Any

from tracefp4.adapters.verl.figures import rename_figures


def test_figures_lose_verls_prefix_and_shares_are_of_sums() -> None:
    metrics: dict[str, Any] = {
        "actor/pg_loss": 0.5,
        "actor/guidance/rows": 200.0,
        "actor/guidance/guided_rows": 150.0,
        "actor/router/rows": 200.0,
        "actor/router/replayed_rows": 200.0,
        "actor/tbpo/dropped_share/sum": 3.0,
        "actor/tbpo/dropped_share/weight": 12.0,
        "actor/tbpo/dropped_share_negative/sum": 0.0,
        "actor/tbpo/dropped_share_negative/weight": 0.0,  # no such response: nothing to report
        "actor/code_mismatch/after/key/layer0": 0.125,
        "perf/sum": 7.0,
    }
    rename_figures(metrics)
    assert metrics == {
        "actor/pg_loss": 0.5,
        "guidance/rows": 200.0,
        "guidance/guided_rows": 150.0,
        "guidance/guided_share": 0.75,
        "router/rows": 200.0,
        "router/replayed_rows": 200.0,
        "router/replayed_share": 1.0,
        "tbpo/dropped_share": 0.25,
        "code_mismatch/after/key/layer0": 0.125,
        "perf/sum": 7.0,
    }
