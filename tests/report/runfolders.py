"""Run folders for the tests of the report, written as the loop writes them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracefp4.report import RunLogger

SITES = ("expert_input", "key", "value")
QUANTIZED = {"naive", "qat", "trace", "trace-all"}


def metrics_of(method: str, seed: int, step: int, layers: int = 3) -> dict[str, float]:
    """Figures of one step, smooth and different in every method and seed."""
    wave = 1 + 0.1 * math.sin(step + seed)
    scale = {"bf16": 1.0, "qat": 9.0, "trace": 1.5}.get(method, 3.0)
    out = {
        "reward/mean": 0.3 + 0.01 * step + 0.02 * seed,
        "mismatch/logprob_abs_diff_mean": 0.001 * scale * wave,
        "mismatch/logprob_abs_diff_max": 0.1 * scale * wave,
        "train/entropy": 0.2 * wave,
        "train/grad_norm": 0.3 * wave,
        "train/clip_frac": 0.01 * wave,
        "tis/ess_untruncated": 1 - 0.001 * scale,
        "response/length_mean": 30 * wave,
        "response/length_max": 50.0,
        "response/truncated_share": 0.0,
        "policy/lag": 0.0,
        "rollout_corr/kl": 0.1,
    }
    if method in QUANTIZED:
        for when in ("before", "after") if method != "naive" else ("before",):
            out[f"code_mismatch/{when}"] = 0.1 * wave
            for site in SITES:
                for layer in range(layers):
                    out[f"code_mismatch/{when}/{site}/layer{layer}"] = 0.05 * (layer + 1) * wave
    if method.startswith("trace"):
        out |= {"guidance/guided_share": 1.0, "guidance/fallback/stale": 0.0, "guidance/fallback/missing": 0.0}
    return out


def write_run(
    folder: Path,
    method: str = "trace",
    seed: int = 0,
    steps: int = 6,
    planned: int | None = None,
    config: Mapping[str, Any] | None = None,
    change: Mapping[int, Mapping[str, float]] | None = None,
) -> Path:
    """A run folder. planned: more than `steps` leaves it unfinished; change: figures of some steps to replace."""
    planned = steps if planned is None else planned
    folder.mkdir(parents=True)
    settings = {
        "method": {"name": method},
        "run": {"seed": seed, "steps": planned, "eval_prompts": 100},
        "sampling": {"max_new_tokens": 80},
        "train": {"tis_cap": 5.0},
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    about = {
        "method": method,
        "seed": seed,
        "commit": "0123456789abcdef",
        "versions": {"python": "3.11", "torch": "2.13"},
        "hardware": {"cpu": "A CPU", "cores": 2, "gpu": None},
        "recipe_hash": "4a17",
        "config_hash": "c0ff",
        "command": "tracefp4 train mine.toml",
    }
    (folder / "run.json").write_text(json.dumps(about))
    with RunLogger(folder, tensorboard=False) as logger:
        for step in range(steps):
            timing = {"rollout_seconds": 2.0 + step / 10, "train_seconds": 4.0, "rollout_tokens_per_second": 900.0}
            logger.log(step, metrics_of(method, seed, step) | dict((change or {}).get(step, {})), timing)
    if steps >= planned:
        final = {"method": method, "seed": seed, "steps": planned}
        final |= {"eval/pass_rate_start": 0.3, "eval/pass_rate_end": 0.6, "eval/n": 100}
        (folder / "final.json").write_text(json.dumps(final))
    return folder


def write_comparison(root: Path, steps: int = 6) -> Path:
    """bf16, qat and trace with two seeds each, laid out as by `tracefp4 compare`; the last trace run is unfinished."""
    for method in ("bf16", "qat", "trace"):
        for seed in (0, 1):
            cut = steps // 2 if (method, seed) == ("trace", 1) else 0
            write_run(root / method / f"seed{seed}", method, seed, steps - cut, planned=steps)
    return root


HOSTILE_NAME = "<script>globalThis.hacked=1<x&\"'"
"""A folder and a method of this name."""
