"""Ways to cut the work of attention and experts, timed within whole decode steps on one GPU.

    PYTHONPATH=src python benchmarks/h200_step_sweep.py --out DIR [--context 8192] [--passes 2] [--only TEXT]

A kernel alone, with pauses between its calls, runs at the GPU's full clock. Decode steps in a row do not: at 8K of FP4
they draw all the power that an H200 may have, and its multiprocessors go at three quarters to nine tenths of their
clock (docs/benchmarks.md). What is fastest there is what costs least power, which `h200_kernels_sweep.py` cannot see.
So each candidate decodes here as `tracefp4 bench rollout` does, checked by it first, all candidates in turn and then
once more; a line each: median and quartiles of a step, the clock, the watts, and how it stands to the default of the
same pass. DIR/steps.json is written after every candidate.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tracefp4.bench import rollout
from tracefp4.bench.registry import environment
from tracefp4.bench.rollout_table import Row
from tracefp4.kernels.grouped_experts import triton as experts
from tracefp4.kernels.paged_attention import triton as attention
from tracefp4.kernels.triton_math import use_dependent_launch

FORM = "fp4-recorded"


@dataclass(frozen=True)
class Changes:
    """What a candidate changes in the default settings of attention and of the experts; pdl: dependent launch."""

    attention: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    pdl: bool = False


def candidates(sms: int) -> dict[str, Changes]:
    """By name; the first is the default as it is."""
    four = {"programs": 16 * sms, "registers": 128, "lazy": True}
    wide = {"outputs": 128, "down": 256, "num_stages": 3, "registers": None}
    return {
        "default": Changes(),
        "dependent launch": Changes(pdl=True),
        "lazy": Changes({"lazy": True}),
        "16 programs, 128 registers, lazy": Changes(four),
        "a context a program, 16 programs": Changes(four | {"even": False}),
        "experts: 128 outputs": Changes(experts=wide),
        "lazy, fused, dependent launch": Changes({"lazy": True, "fused": True}, pdl=True),
        "experts: four programs": Changes(experts={"num_stages": 3, "registers": 128, "parts": 4}),
        "experts: whole tiles, three stages": Changes(experts={"num_stages": 3, "parts": 1}),
        "11 programs": Changes({"programs": 11 * sms}),
        "8 programs": Changes({"programs": 8 * sms, "registers": None}),
        "three stages, lazy": Changes({"num_stages": 3, "lazy": True}),
        "experts: two programs": Changes(experts={"registers": None}),
    }


def changed(default: Callable[..., Any], changes: dict[str, Any]) -> Callable[..., Any]:
    return lambda *operands: replace(default(*operands), **changes)


def time_steps(model: rollout.UniformModel, changes: Changes, args: argparse.Namespace, copy: float) -> Row:
    row = Row(FORM, args.contexts[0])
    with ExitStack() as stack:
        for module, change in ((attention, changes.attention), (experts, changes.experts)):
            stack.enter_context(patch.object(module, "default_config", changed(module.default_config, change)))
        use_dependent_launch(changes.pdl)
        stack.callback(use_dependent_launch, False)
        rollout.run_row(row, model, args, copy)
    return row


def line(name: str, row: Row, default: Row) -> str:
    if row.error is not None or row.median_ms is None or row.quartiles_ms is None:
        return f"{name:36s} FAILED: {(row.error or '').splitlines()[:1]}"
    low, high = row.quartiles_ms
    over = f"{row.median_ms / default.median_ms:.3f}" if default.median_ms else "-"
    return f"{name:36s} {row.median_ms:6.2f} ms  {low:.2f}-{high:.2f}  {over} of the default  {row.clocks}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--context", type=int, default=8192, help="tokens that a sequence has in its cache")
    parser.add_argument("--passes", type=int, default=2, help="how often each candidate has its turn")
    parser.add_argument("--commit", help="commit to write into the results, where there is no git checkout")
    parser.add_argument("--only", default="", help="candidates whose name has this in it, and the default")
    own = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: a step's power and clock are measured on one", file=sys.stderr)
        return 2
    args = rollout.parse(["--device", "cuda", "--forms", FORM, "--contexts", str(own.context), "--no-profile"])
    device = torch.device("cuda")
    copy = rollout.copy_bandwidth("cuda")
    model = rollout.build(rollout.model_shape(args), replace(rollout.recipe_of(FORM, args), guided_layers=()), args)
    every = candidates(torch.cuda.get_device_properties(device).multi_processor_count)
    names = ["default", *(name for name in every if name != "default" and own.only in name)]
    document = {"environment": environment(device, own.commit), "copy_bytes_per_s": copy, "context": own.context}
    found: list[dict[str, Any]] = []
    own.out.mkdir(parents=True, exist_ok=True)
    for number in range(own.passes):
        default = Row(FORM, own.context)
        for name in names:
            row = time_steps(model, every[name], args, copy)
            default = row if name == "default" else default
            print(line(name, row, default), flush=True)
            found.append({"pass": number, "candidate": name, "changes": asdict(every[name]), **asdict(row)})
            (own.out / "steps.json").write_text(json.dumps({**document, "rows": found}, indent=1) + "\n")
    return int(any(row["error"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
