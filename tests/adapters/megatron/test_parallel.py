"""Two gloo processes under expert, tensor (with sequence) and pipeline parallelism give what one process gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core is not installed (make test-megatron)")

import mcore_cpu
import mcore_workers
from mcore_cpu import Case, build, logits_and_gradients, rolled_out
from tracefp4.nn.observe import SiteObserver

TESTS = Path(mcore_workers.__file__).parent


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Rolled out in BF16, so that the recorded slots are not the FP32 trainer's own; of different lengths."""
    return [rolled_out("trace-full", n, dtype="bfloat16") for n in (4, 2, 3)]


@pytest.fixture(scope="module")
def alone(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """(logits, gradients) of each case on one process."""
    with mcore_cpu.megatron(tmp_path_factory.mktemp("one") / "rendezvous"):
        model, context = build(cases[0])
        out = []
        for case in cases:
            model.zero_grad()
            out.append(logits_and_gradients(case, model, context))
        yield out


@pytest.fixture(scope="module")
def observed(cases: list[Case], alone: list[Any]) -> dict[str, float]:
    """How far the slots of the first case are from the rollout's, on one process."""
    return metrics_of([mcore_workers.observed(cases[0], *build(cases[0]))])


def metrics_of(totals: list[Any]) -> dict[str, float]:
    observer = SiteObserver()
    for each in totals:
        observer.add(each)
    return observer.metrics()


@pytest.fixture(scope="module")
def together(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("two")
    torch.save(cases, folder / "cases.pt")
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(TESTS / "mcore_workers.py"), str(folder)]
    environment = {**os.environ, "PYTHONPATH": paths}
    ranks = [
        subprocess.Popen([*command, rank], env=environment, stderr=subprocess.PIPE, text=True) for rank in ("0", "1")
    ]
    errors = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(e[-2000:] for e in errors)
    return {name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in (0, 1)]
            for name in mcore_workers.TOPOLOGIES}  # fmt: skip


def assert_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-4, atol=2e-5, msg=name)


def experts_of(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g for name, g in gradients.items() if "mlp.experts" in name}


def test_expert_parallel(together: dict[str, list[Any]], alone: list[Any]) -> None:
    """Rounded before it is sent: the rank that holds an expert gets the slots of the rank that holds the token."""
    ranks = together["expert"]
    for rank in (0, 1):
        torch.testing.assert_close(ranks[rank]["logits"], alone[rank][0], rtol=0, atol=5e-6)
        own = {name: g for name, g in ranks[rank]["gradients"].items() if "mlp.experts" not in name}
        assert_gradients(own, alone[rank][1])
        half = slice(4 * rank, 4 * rank + 4)
        both = {name: (g + alone[1][1][name])[half] for name, g in experts_of(alone[0][1]).items()}
        assert_gradients(experts_of(ranks[rank]["gradients"]), both)


def test_a_rank_whose_experts_get_no_token_takes_part_in_the_backward_pass(together: dict[str, list[Any]]) -> None:
    """Else the others would wait for it in the exchange of gradients."""
    busy, idle = (rank["one_sided"] for rank in together["expert"])
    assert all(g.abs().max() > 0 for g in experts_of(busy).values())
    assert all(not g.any() for g in experts_of(idle).values())
    assert idle["model.layers.0.mlp.gate.weight"].abs().max() > 0


@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
def test_tensor_and_sequence_parallel(
    together: dict[str, list[Any]], alone: list[Any], observed: dict[str, float], packed: bool
) -> None:
    """A rank rounds its own heads of K and V, and its own part of the rows that enter the experts."""
    ranks = [result[packed] for result in together["tensor"]]
    for rank in ranks:
        torch.testing.assert_close(rank["logits"], alone[0][0], rtol=0, atol=5e-6)
    assert metrics_of([rank["observed"] for rank in ranks]) == pytest.approx(observed, abs=5e-4)
    parts = [experts_of(rank["gradients"]) for rank in ranks]
    assert_gradients({name: g + parts[1][name] for name, g in parts[0].items()}, alone[0][1])


@pytest.mark.parametrize("packed", [True, False], ids=["thd", "bshd"])
def test_context_parallel(
    together: dict[str, list[Any]], alone: list[Any], observed: dict[str, float], packed: bool
) -> None:
    """K and V are rounded on the rank that computed them, before others see them."""
    ranks = [result[packed] for result in together["context"]]
    assert sorted(torch.cat([rank["tokens"] for rank in ranks]).tolist()) == list(range(len(alone[0][0])))
    for rank in ranks:
        assert len(rank["tokens"])
        torch.testing.assert_close(rank["logits"], alone[0][0][rank["tokens"]], rtol=0, atol=5e-6)
    assert metrics_of([rank["observed"] for rank in ranks]) == pytest.approx(observed, abs=5e-4)
    total = {name: g + ranks[1]["gradients"][name] for name, g in ranks[0]["gradients"].items()}
    assert_gradients(total, alone[0][1])


def test_pipeline_parallel(together: dict[str, list[Any]], alone: list[Any]) -> None:
    """Three micro-batches in flight under full recomputation: each is recomputed with its own guidance."""
    first, last = together["pipeline"]
    for got, (want, _) in zip(last["logits"], alone, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    mean = {name: sum(gradients[name] for _, gradients in alone) / len(alone) for name in alone[0][1]}
    for rank, layer in ((first, 0), (last, 1)):
        own = {name: g for name, g in rank["gradients"].items() if f"layers.{layer}." in name}
        assert experts_of(own)
        assert_gradients(own, mean)
