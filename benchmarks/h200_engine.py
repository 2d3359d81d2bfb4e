"""One run of the engine on a GPU: is it right, then how fast is it. Every part is a process of its own with a limit of
its own, so that one that fails or hangs keeps nothing from the others; results are written after each.

    PYTHONPATH=src python benchmarks/h200_engine.py --out DIR [--seconds 400] [--commit HASH]

Parts, in order: `equality` (below), the benchmark of each form, a sweep of how attention and experts are cut at the
benchmark's batches, then the tests of kernels and engine on the GPU.
Needs torch, Triton, numpy and pydantic; the tests part needs pytest and transformers too.

`equality`, on a small model: the engine over the kernels against the engine in plain torch on the CPU (greedy tokens,
log-probs, records of the first layer); the same run with CUDA graphs and without, bit for bit; with graphs after a
weight update against a fresh engine, bit for bit; many sequences, padding, preemption and top-p against sequences that
run alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tracefp4.recipe import QuantRecipe
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.rollout.model import ModelShape
from tracefp4.rollout.weights import weight_sizes
from tracefp4.types import Request, SamplingParams, Trajectory


def shape_of(head_dim: int, experts: int) -> ModelShape:
    """Grouped queries, a vocabulary of several chunks of the sampler; 4 experts: all of them for every token."""
    return ModelShape(
        layers=3, hidden=256, heads=8, kv_heads=2, head_dim=head_dim, experts=experts, experts_per_token=4,
        expert_width=128, dense_width=256, vocab=9001, norm_eps=1e-6, rope_theta=1e4, norm_topk_prob=True,
        max_positions=1024, tied_embeddings=False, dense_layers=frozenset(),
    )  # fmt: skip


def weights(shape: ModelShape, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in weight_sizes(shape):
        w = torch.randn(size, generator=g)
        # Logits of some spread, so that greedy choices are no ties.
        made[name] = 1 + 0.1 * w if "norm" in name else w * (0.15 if "lm_head" in name else size[-1] ** -0.5)
    return made


def recipe(form: str, layers: int) -> QuantRecipe:
    if form == "bf16":
        return QuantRecipe(layers)
    return QuantRecipe(layers, "nvfp4", "nvfp4", "nvfp4", guided_layers=tuple(range(layers)))


def engine(
    form: str, device: str, head_dim: int = 128, experts: int = 16, seed: int | None = 0, **settings: Any
) -> RolloutEngine:
    shape = shape_of(head_dim, experts)
    sizes = {"max_num_seqs": 12, "max_model_len": 320, "max_tokens_per_step": 256, **settings}
    made = RolloutEngine(shape, recipe(form, shape.layers), RolloutConfig(**sizes), device=device)
    if seed is not None:
        made.update_weights(weights(shape, seed).items(), 0)
    return made


def requests(n: int, new: int = 24, temperature: float = 0.0, top_p: float = 1.0, longest: int = 200) -> list[Request]:
    g = torch.Generator().manual_seed(n)
    found = []
    for i in range(n):
        length = int(torch.randint(3, longest, (1,), generator=g))
        prompt = tuple(torch.randint(0, 9000, (length,), generator=g).tolist())
        found.append(Request(f"r{i}", prompt, SamplingParams(temperature, top_p, new, seed=i)))
    return found


def agree(a: Trajectory, b: Trajectory) -> Tensor:
    """Differences of log-probs over the tokens before the first that differs."""
    pairs = enumerate(zip(a.response_ids, b.response_ids, strict=False))
    n = next((i for i, (x, y) in pairs if x != y), len(a.response_ids))
    return (a.logprobs[:n] - b.logprobs[:n]).abs()


def same(xs: list[Trajectory], ys: list[Trajectory], a: RolloutEngine, b: RolloutEngine) -> None:
    for x, y in zip(xs, ys, strict=True):
        assert x.response_ids == y.response_ids, (x.request_id, x.response_ids, y.response_ids)
        assert torch.equal(x.logprobs, y.logprobs), (x.request_id, float(agree(x, y).max()))
        if x.guidance is not None and y.guidance is not None:
            assert a.store.get(x.guidance).checksum() == b.store.get(y.guidance).checksum(), x.request_id


def against_the_cpu(form: str, head_dim: int, experts: int) -> str:
    """Where the router chooses, a tie that rounding turns the other way swaps an expert, and FP4 codes at a boundary
    flip: of such runs only the median log-prob is held to something."""
    ask = requests(8)
    gpu, cpu = engine(form, "cuda", head_dim, experts), engine(form, "cpu", head_dim, experts, backend="torch")
    differ, codes = [], [0.0]
    for x, y in zip(gpu.generate(ask), cpu.generate(ask), strict=True):
        differ.append(agree(x, y))
        if x.guidance is not None and y.guidance is not None:
            r, s = gpu.store.get(x.guidance), cpu.store.get(y.guidance)
            rows = len(x.prompt_ids)
            for site in ("key", "value"):
                a, b = (z.sites[site].payload[0, :rows] for z in (r, s))
                codes.append(float((a != b).float().mean()))
    d = torch.cat(differ)
    said = f"{len(d)} of {24 * len(ask)} greedy tokens before a first difference, log-probs off by {d.median():.3g}"
    said += f" (median), {d.max():.3g}; {max(codes):.2%} of first-layer K and V bytes differ"
    exact = form == "bf16" and experts == 4
    assert len(d) > 8, said
    assert d.median() < (0.02 if exact else 0.3), said
    assert not exact or d.max() < 0.15, said
    assert max(codes) < 0.02, said
    return said


def graphs_change_nothing(form: str) -> str:
    ask = [*requests(10, temperature=1.0), *[Request("p", (5, 6, 7), SamplingParams(0.8, 0.9, 30, seed=3))]]
    on, off = engine(form, "cuda"), engine(form, "cuda", cuda_graphs=False)
    same(on.generate(ask), off.generate(ask), on, off)
    assert on.kernels is not None
    assert on.kernels.runner.captures > 1
    again = [Request(f"again {r.request_id}", r.prompt_ids, r.sampling) for r in ask]
    captures = on.kernels.runner.captures
    same(on.generate(again), off.generate(again), on, off)
    assert on.kernels.runner.captures == captures
    return f"equal bits, {captures} graphs captured"


def graphs_survive_an_update(form: str) -> str:
    ask = requests(6, temperature=1.0)
    used, fresh = engine(form, "cuda"), engine(form, "cuda", seed=None)
    used.generate([Request(f"before {r.request_id}", r.prompt_ids, r.sampling) for r in ask])
    places = [t.data_ptr() for t in used.model.weight_tensors]
    used.update_weights(weights(used.shape, 1).items(), 1)
    assert [t.data_ptr() for t in used.model.weight_tensors] == places
    fresh.update_weights(weights(used.shape, 1).items(), 1)
    same(used.generate(ask), fresh.generate(ask), used, fresh)
    return "equal bits"


def batches_change_little(form: str) -> str:
    """Products of another size may be summed in another order; rows must not be another's.

    Twelve pages of 64 for 14 sequences of up to 263 tokens, each of which takes a page more in its response. With
    bursts a sequence has the pages of its next 15 tokens from the start, so that short responses would never be without
    one. Greedy, as a draw from 9001 tokens is soon another one. Three sequences that were preempted are compared, and
    two that were not; BF16 has to agree with a sequence that ran alone beyond the rows that were forwarded twice.
    """
    new = 64
    ask = requests(14, new=new)
    crowded = engine(form, "cuda", num_pages=12, max_num_seqs=14)
    done = crowded.generate(ask)
    # Rows that were forwarded twice have no experts; of the last of them the next token was drawn a second time.
    twice = {i: int((t.routed_experts[:, 0, 0] < 0).sum()) for i, t in enumerate(done) if t.routed_experts is not None}
    preempted, others = [i for i, n in twice.items() if n], [i for i, n in twice.items() if not n]
    chosen = [*preempted[:3], *others[:2]]
    differ = {i: agree(done[i], engine(form, "cuda", max_num_seqs=1).generate([ask[i]])[0]) for i in chosen}
    beyond = sum(max(0, len(differ[i]) + len(ask[i].prompt_ids) - twice[i] - 1) for i in preempted[:3])
    d, count = torch.cat(list(differ.values())), crowded.scheduler.num_preemptions
    said = f"{len(d)} of {len(chosen) * new} tokens before a first difference, {beyond} of them after a preemption, "
    said += (
        f"log-probs off by {d.median():.3g} (median), {d.max():.3g}; {count} preemptions of {len(preempted)} sequences"
    )
    assert count >= len(preempted) >= 3, said
    assert len(d) > 20, said
    assert form != "bf16" or beyond > 0, said
    assert d.median() < (0.02 if form == "bf16" else 0.3), said
    return said


def probes(form: str) -> str:
    if form == "bf16":
        return "nothing to probe"
    made = engine(form, "cuda")
    ask = [Request(r.request_id, r.prompt_ids, r.sampling, probe=i == 1) for i, r in enumerate(requests(4))]
    t = made.generate(ask)[1]
    assert t.guidance is not None
    assert t.probe is not None
    own, probe = made.store.get(t.guidance), made.store.get(t.probe)
    for site, width in (("expert_input", 256), ("key", 256), ("value", 256)):
        plane = width // 8
        assert torch.equal(own.sites[site].payload[..., :plane], probe.sites[site].payload[..., :plane]), site
    return "the probe's low plane is the record's"


CHECKS: dict[str, Callable[..., str]] = {
    "against the CPU, no choice of experts": lambda form: against_the_cpu(form, 128, 4),
    "against the CPU, routed": lambda form: against_the_cpu(form, 128, 16),
    "against the CPU, head_dim 64": lambda form: against_the_cpu(form, 64, 4),
    "graphs on and off": graphs_change_nothing,
    "graphs after an update": graphs_survive_an_update,
    "batch, padding, preemption": batches_change_little,
    "probes": probes,
}


def equality(out: Path) -> int:
    """Exit status 1 if a check failed."""
    found: dict[str, Any] = {}
    torch.set_num_threads(8)
    for name, check in CHECKS.items():
        for form in ("bf16", "fp4"):
            begun = time.perf_counter()
            try:
                said, ok = check(form), True
            except Exception as error:
                traceback.print_exc(limit=-4)
                said, ok = f"{type(error).__name__}: {error}"[:400], False
            found[f"{form}: {name}"] = {"ok": ok, "said": said, "seconds": round(time.perf_counter() - begun, 1)}
            print("ok  " if ok else "FAIL", f"{form}: {name}: {said}", flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(f["ok"] for f in found.values()))


def sweep(out: Path) -> int:
    """How attention and experts are cut at the batches that fill the memory: 499 x 8K and 31 x 128K in FP4, 85 x 8K
    and 5 x 128K in BF16. Every setting is checked first. Settings: tile, warps, stages, programs per multiprocessor;
    output features, rows, warps, stages, inputs a step."""
    from tracefp4.bench import attention, experts
    from tracefp4.bench.registry import Result, Timer, run_case

    device = torch.device("cuda")
    timer, results = Timer(device, 15), list[Result]()
    cases = []
    for batch, context, kind, settings in (
        (
            499,
            8192,
            "fp4",
            [(64, 1, 2, 12), (64, 1, 2, 24), (64, 1, 2, 48), (64, 1, 2, 96), (64, 1, 3, 24), (32, 1, 2, 24)],
        ),
        (31, 131072, "fp4", [(64, 1, 2, 12), (64, 1, 2, 24), (64, 1, 2, 48)]),
        (85, 8192, "bf16", [(64, 4, 2, 4), (64, 4, 2, 8), (64, 4, 2, 16)]),
        (5, 131072, "bf16", [(64, 4, 2, 4), (64, 4, 2, 8)]),
    ):
        shape = ([context] * batch, 32, 4, 128, 64)
        cases += [attention._configured(f"{batch} x {context}", shape, kind, c) for c in settings]
    size = (experts.HIDDEN, experts.WIDTH, experts.EXPERTS, experts.TOP)
    for tokens, kind, cuts in (
        (
            499,
            "W4A4",
            [(64, 64, 4, 3), (64, 32, 2, 3), (128, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3), (32, 32, 1, 3)],
        ),
        (31, "W4A4", [(32, 8, 1, 3), (64, 8, 1, 3), (16, 8, 1, 4), (32, 8, 1, 4)]),
        (85, "BF16", [(64, 16, 4, 4, 128), (32, 16, 4, 4, 128), (64, 8, 4, 4, 128)]),
        (5, "BF16", [(64, 8, 4, 4, 128), (32, 8, 4, 4, 128)]),
    ):
        cases += [experts._configured(tokens, kind, size, c) for c in cuts]
    for case in cases:
        results.append(run_case(case, device, timer))
        torch.cuda.empty_cache()
        last = results[-1]
        print(f"{last.op}, {last.name}: {last.error or last.checked}; {last.median_us} us", flush=True)
        out.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
    return int(any(r.error is not None for r in results))


def merged(out: Path) -> str:
    """One table of the forms that were measured by processes of their own."""
    from tracefp4.bench.rollout_table import Row, table

    rows = []
    for path in sorted(out.glob("*/rollout.json")):
        rows += [Row(**r) for r in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="for all parts together")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--part", choices=["equality", "sweep"], help="run this part in this process")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part == "equality":
        return equality(args.out / "equality.json")
    if args.part == "sweep":
        return sweep(args.out / "sweep.json")
    begun, python = time.monotonic(), sys.executable
    bench = [python, "-m", "tracefp4.bench.rollout", "--device", "cuda", "--commit", args.commit]
    tests = ["kernels/test_decoder_ops.py", "kernels/test_sampling.py", "kernels/test_quantize_record_triton.py"]
    tests += ["guidance/test_stream.py", "guidance/test_staging.py", "rollout/test_kernel_engine.py"]
    parts: list[tuple[str, float, list[str]]] = [
        ("equality", 110, [python, __file__, "--part", "equality", "--out", str(args.out)]),
        ("fp4", 130, [*bench, "--forms", "fp4,fp4-recorded", "--out", str(args.out / "fp4"), "--seconds", "100"]),
        ("bf16", 90, [*bench, "--forms", "bf16", "--out", str(args.out / "bf16"), "--seconds", "70"]),
        ("sweep", 60, [python, __file__, "--part", "sweep", "--out", str(args.out)]),
        ("tests", 90, [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *[f"tests/{t}" for t in tests]]),
    ]
    summary: dict[str, Any] = {}
    for name, limit, command in parts:
        left = args.seconds - (time.monotonic() - begun)
        if left < 15:
            summary[name] = "not begun: the time is over"
            continue
        part_begun = time.monotonic()
        with open(args.out / "log.txt", "a+", encoding="utf-8") as log:
            print(f"== {name}", file=log, flush=True)
            try:
                done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=min(limit, left))
                ended = f"exit status {done.returncode}"
            except subprocess.TimeoutExpired:
                ended = "stopped at its limit"
        summary[name] = f"{ended} after {time.monotonic() - part_begun:.0f} s"
        tail = (args.out / "log.txt").read_text(encoding="utf-8").rsplit(f"== {name}\n", 1)[-1].splitlines()[-25:]
        print(f"== {name}: {summary[name]}", *tail, sep="\n", flush=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        (args.out / "rollout.md").write_text(merged(args.out) + "\n", encoding="utf-8")
    for path in args.out.glob("*/rollout.md"):  # the merged table has their rows
        path.unlink()
    print(merged(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
