"""What two gloo processes do in tests/adapters/megatron/test_parallel.py; each leaves its results in a file.

Run as ``python tests/mcore_workers.py FOLDER RANK``; FOLDER holds cases.pt, a list of mcore_cpu.Case.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import mcore_cpu
from mcore_cpu import Case
from tracefp4.nn.observe import SiteObserver, Totals


def observed(case: Case, model: Any, context: Any, packed: bool = True, align: int = 1) -> Totals:
    """What this rank counts of its slots against the rollout's, in one forward."""
    record = next(iter(case.micro_batch.guidance.values()))
    rows = record.valid.nonzero()[:, 0]
    probe = {where: r.select(rows) for where, r in case.micro_batch.guidance.items()}  # full codes
    probing = replace(case, micro_batch=replace(case.micro_batch, guidance={}, probe=probe, probe_rows=rows))
    numbers, arguments = case.inputs(packed, align)
    observer = SiteObserver()
    with torch.no_grad(), context.armed(probing.local(model, numbers), observer):
        model(**arguments)
    return observer.totals()


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def expert_parallel(rank: int, cases: list[Case]) -> dict[str, Any]:
    """Each rank holds half of the experts, and its own sequences; then all tokens go to the first rank's experts."""
    case = cases[rank]
    model, context = mcore_cpu.build(case, expert_model_parallel_size=2, **RECOMPUTE)
    model.train()
    logits, gradients = mcore_cpu.logits_and_gradients(case, model, context)
    model.zero_grad()
    half = {layer: (torch.stack([e[:, 0] % 4, (e[:, 0] + 1) % 4], 1), torch.ones_like(valid))
            for layer, (e, valid) in case.micro_batch.experts.items()}  # fmt: skip
    one_sided = replace(case, micro_batch=replace(case.micro_batch, experts=half))
    _, idle = mcore_cpu.logits_and_gradients(one_sided, model, context)
    return {"logits": logits, "gradients": gradients, "one_sided": idle}


def tensor_parallel(rank: int, cases: list[Case]) -> dict[str, Any]:
    """Each rank holds half of the heads, and half of every sequence between the attention layers."""
    case = cases[0]
    model, context = mcore_cpu.build(
        case, tensor_model_parallel_size=2, sequence_parallel=True, kwargs={"parallel_output": False}, **RECOMPUTE
    )
    model.train()
    out = {}
    for packed in (True, False):
        model.zero_grad()
        numbers, arguments = case.inputs(packed, align=2)
        with context.armed(case.local(model, numbers)):
            logits = case.rows(model(**arguments), numbers)
        mcore_cpu.loss(case, logits).backward()
        context.rest()
        out[packed] = {"logits": logits.detach(), "gradients": mcore_cpu.gradients(model, case.hf)}
        out[packed]["observed"] = observed(case, model, context, packed, align=2)
    return out


def pipeline_parallel(rank: int, cases: list[Case]) -> dict[str, Any]:
    """Each rank holds half of the layers; several micro-batches are in flight, and their activations recomputed."""
    model, context = mcore_cpu.build(
        cases[0], pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True,
        batch_p2p_comm=False, deallocate_pipeline_outputs=True,
        kwargs={"pre_process": rank == 0, "post_process": rank == 1}, **RECOMPUTE,
    )  # fmt: skip
    model.train()
    logits: list[Tensor] = []

    def forward_step(batches: Any, chunk: Any) -> Any:
        key, case = next(batches)
        numbers, arguments = case.inputs(packed=True)

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
            rows = case.rows(output, numbers)
            logits.append(rows.detach())
            return mcore_cpu.loss(case, rows), {}

        with context.armed(case.local(chunk, numbers, key)):
            return chunk(**arguments), loss

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(enumerate(cases, start=1)), model=[model],
        num_microbatches=len(cases), seq_length=1, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    context.rest()
    return {"logits": logits, "gradients": mcore_cpu.gradients(model, cases[0].hf)}


def context_parallel(rank: int, cases: list[Case]) -> dict[str, Any]:
    """Each rank holds two chunks of every sequence, one from either end."""
    case = cases[0]
    model, context = mcore_cpu.build(case, context_parallel_size=2, **RECOMPUTE)
    model.train()
    out = {}
    for packed in (True, False):
        model.zero_grad()
        numbers, arguments = case.inputs(packed, align=4)
        tokens = case.ranks_tokens(numbers)
        with context.armed(case.local(model, numbers)):
            logits = case.rows(model(**arguments), numbers)
        mcore_cpu.loss(case, logits, tokens).backward()
        context.rest()
        gradients = mcore_cpu.gradients(model, case.hf)
        seen = observed(case, model, context, packed, align=4)
        out[packed] = {"logits": logits.detach(), "tokens": tokens, "gradients": gradients, "observed": seen}
    return out


TOPOLOGIES = {
    "expert": (expert_parallel, {"expert_model_parallel_size": 2}),
    "tensor": (tensor_parallel, {"tensor_model_parallel_size": 2}),
    "context": (context_parallel, {"context_parallel_size": 2}),
    "pipeline": (pipeline_parallel, {"pipeline_model_parallel_size": 2}),
}


def main(folder: Path, rank: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases = torch.load(folder / "cases.pt", weights_only=False)
    for name, (work, parallel) in TOPOLOGIES.items():
        with mcore_cpu.megatron(folder / f"rendezvous-{name}", rank, 2, **parallel):
            results = work(rank, cases)
        torch.save(results, folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
