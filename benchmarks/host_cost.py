"""What one rollout and one update of a small policy cost the host: operations, kernels, questions to the device, time.

    PYTHONPATH=src python benchmarks/host_cost.py [--modes bf16,trace] [--out FILE.json]     counts, on any CPU
    PYTHONPATH=src python benchmarks/host_cost.py --device cuda --modes bf16,trace           times, on a GPU

A run of a small policy on a large GPU waits for the host (docs/LOG.md). On the CPU every Triton kernel, and a whole
captured decode step, has a stand-in of no arithmetic to speak of, so that what is left is what the host does beside a
GPU: its clock is then an estimate, its counts are exact but for what only a GPU does (copies of pinned memory, memory
of the allocator). Counted are ATen operations that are no views (nearly each is a launch), the launches of the
stand-ins, tensors sent to the device, and questions that wait for it where a tensor lies there (`item`, `nonzero`,
boolean masks), with the places that ask them; a CPU does not say which tensors are the host's own, so those places are
to be read. On a GPU the real thing runs, questions are what torch's own sync debug mode reports, and the device's time
is shown kernel by kernel.

The policy is that of recipes/reproduce/ladder-6.toml with random weights; --responses, --tokens and the like set the
size of a step. Where tokens are few the forward's arithmetic on the CPU is small beside its dispatch; the real thing
has 256 responses of about 150 tokens, whose records are larger.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tracefp4.guidance.store import MemoryStore
from tracefp4.methods import QuantConfig, get_method
from tracefp4.rollout.config import RolloutConfig
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.train.config import TrainConfig
from tracefp4.train.trainer import GRPOTrainer
from tracefp4.types import Request, RolloutBatch, SamplingParams, Trajectory

MODES = ("bf16", "qat", "trace", "trace-all", "quads", "qarl")
STOP = 1
SOURCE = str(Path(__file__).resolve().parents[1] / "src")
ASKS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero", "aten.masked_select")

LAUNCHES = {
    "add_norm": 1, "norm_rotate": 1, "choose_experts": 1, "write_dense": 1, "read_rows": 1, "write_kv": 1,
    "quantize_record": 1, "paged_decode": 2, "_causal": 1, "routed_experts": 6, "draw_tokens": 3,
    "fake_quantize_rows": 1, "guided_round_rows": 1, "group_amax": 1, "fake_quantize_groups": 1, "decode step": 1,
    "compensated_rows": 3, "chosen_outputs": 1,
}  # fmt: skip
"""Launches of one call; of routed experts in FP4 (4 in BF16), of compensated rows where columns are selected."""


class Counts(TorchDispatchMode):
    """Counts while it is entered; what happens inside a stand-in counts as that stand-in alone."""

    now: Counts | None = None

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.kernels, self.places = Counter[str](), Counter[str](), Counter[str]()
        self.by_part = Counter[str]()
        self.sent = self.views = self.muted = 0

    def __enter__(self) -> Any:
        Counts.now = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Counts.now = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.muted:
            name = str(func).rpartition(".")[0]
            if name in ASKS or (name == "aten.index" and any(t is not None and t.dtype == torch.bool for t in args[1])):
                self.places[f"{name.removeprefix('aten.')} {_place()}"] += 1
            if func.is_view or name in ("aten.detach", "aten.lift_fresh", "aten._local_scalar_dense", "aten.empty"):
                self.views += 1
            else:
                self.operations[name] += 1
                self.by_part[Step.part] += 1
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """The innermost line of the package that is being run."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere" if frame is None else f"{frame.f_code.co_filename[len(SOURCE) + 10 :]}:{frame.f_lineno}"


def standing_in(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        counts = Counts.now
        if counts is None:
            return run(*args, **kwargs)
        counts.kernels[name] += 0 if counts.muted else LAUNCHES[name]
        counts.muted += 1
        try:
            return run(*args, **kwargs)
        finally:
            counts.muted -= 1

    return stand_in


def _sent(tensor: Tensor, device: Any) -> Tensor:
    if Counts.now is not None:
        Counts.now.sent += 1
    return tensor.to(device)


def _norm_rotate(qkv: Tensor, q_norm: Tensor, *args: Any, **_: Any) -> tuple[Tensor, Tensor]:
    heads, kv_heads = args[4], args[5]
    x = qkv.view(len(qkv), -1, len(q_norm))
    return x[:, :heads].clone(), x[:, heads : heads + kv_heads].clone()


def _routed(x: Any, experts: Tensor, gates: Tensor, gate_up: Any, *_: Any, **__: Any) -> Tensor:
    return x.clone() if isinstance(x, Tensor) else gates.new_ones(x.shape, dtype=torch.bfloat16)


def _draw(logits: Tensor, temperature: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(0, logits.shape[1], (len(logits),))
    return ids, torch.full((len(logits),), -3.0), torch.ones(len(logits), dtype=torch.bool)


def _decode_step(runner: Any, B: int, nucleus: bool, probed: bool) -> None:
    """In place of a replay: tokens at random; nothing is written to cache or record."""
    runner.out[0, :B] = ids = torch.randint(0, 32, (B,))
    runner.out[1, :B], runner.out[2, :B] = -3.0, 1.0
    runner.tokens[:B] = ids
    runner.positions[:B] += (runner.positions[:B] >= 0).long()


STAND_INS: dict[str, dict[str, Callable[..., Any]]] = {
    "tracefp4.rollout.kernel_model": {
        "add_norm": lambda x, y, w, *_, **__: (x, x.clone()),
        "norm_rotate": _norm_rotate,
        "choose_experts": lambda logits, k, *_, **__: (
            torch.full((len(logits), k), 1 / k), torch.arange(k).expand(len(logits), k).contiguous()
        ),
        "routed_experts": _routed,
        "paged_decode": lambda q, *_, **__: q.clone(),
        "_causal": lambda q, *_, **__: q.clone(),
    },
    "tracefp4.rollout.compensation": {
        "compensated_rows": lambda x, *_, **__: (x.float(), torch.ones(len(x), 1)),
    },
    "tracefp4.rollout.emulated": {
        "chosen_outputs": lambda y, chosen, _, __, dtype, widened=False, **___: torch.zeros(
            chosen.numel(), y.shape[2], dtype=torch.float32 if widened else dtype
        ),
    },
    "tracefp4.rollout.paged_pool": {
        "write_dense": lambda *_, **__: None,
        "write_kv": lambda *_, **__: None,
        "read_rows": lambda cache, slots, **__: tuple(
            torch.zeros(len(slots), cache.heads, cache.head_dim, dtype=torch.bfloat16) for _ in range(2)
        ),
    },
    "tracefp4.rollout.sampler": {"draw_tokens": _draw},
    "tracefp4.nn.rounding": {
        "fake_quantize_rows": lambda x, *_, **__: x.clone(),
        "guided_round_rows": lambda x, *_, **__: x.clone(),
        "group_amax": lambda w: torch.ones(len(w)),
        "fake_quantize_groups": lambda w, *_, **__: w.clone(),
    },
}  # fmt: skip


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """The package as it runs on a GPU, without one."""
    from tracefp4.kernels.guided_round import FORMATS
    from tracefp4.rollout.decode import DecodeRunner

    with ExitStack() as stack:
        for module, functions in STAND_INS.items():
            for name, run in functions.items():
                stack.enter_context(patch(f"{module}.{name}", standing_in(name, run)))
        stack.enter_context(patch("tracefp4.rollout.engine.check_device", lambda *_: None))
        stack.enter_context(patch("tracefp4.nn.rounding.uses_kernel", lambda backend, format, x: format in FORMATS))
        for module in ("rollout.kernel_executor", "train.slices", "types"):
            stack.enter_context(patch(f"tracefp4.{module}.to_device", _sent))
        stack.enter_context(patch.object(DecodeRunner, "_eager", standing_in("decode step", _decode_step)))
        yield


PARTS = {"_micro_batches": "plan", "_old_logprobs": "old log-probs", "_optimizer_step": "optimizer steps"}
"""Methods of the trainer, by what they are called here."""


class Step:
    """A rollout and an update of one mode. size: the arguments of the command line.

    part: of an update, that is running; seconds: of the process, by part.
    """

    part = "rest"

    def __init__(self, mode: str, size: argparse.Namespace) -> None:
        self.size, self.method, self.version = size, get_method(mode), 0
        config = Qwen3MoeConfig(
            vocab_size=32, hidden_size=128, num_hidden_layers=size.layers, num_attention_heads=4, head_dim=64,
            num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=512, initializer_range=0.08,
            pad_token_id=0, eos_token_id=STOP, intermediate_size=128, moe_intermediate_size=128, num_experts=8,
            num_experts_per_tok=2, norm_topk_prob=True,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
        recipe, self.store = self.method.recipe(QuantConfig(), size.layers), MemoryStore()
        cuda = size.device == "cuda"
        rollout = RolloutConfig(
            max_num_seqs=size.responses, max_model_len=32 + size.tokens, page_size=64, backend="triton",
            cuda_graphs=cuda, steps_per_sync=8,
        )  # fmt: skip
        train = TrainConfig(micro_batch_tokens=32768, updates_per_rollout=4)
        self.engine = RolloutEngine(config, recipe, rollout, self.store, size.device)
        self.trainer = GRPOTrainer(
            model, recipe, self.method.forward, train, self.store, loss=self.method.loss, device=size.device
        )
        if not cuda:
            assert self.engine.kernels is not None
            self.engine.kernels.runner.ahead = True  # as on a GPU: the next steps are launched before the books
            self.trainer.context.products = "grouped_mm"
        self.engine.update_weights(self.trainer.named_weights(), 0)
        self.seconds: dict[str, float] = {}
        for name, part in PARTS.items():
            setattr(self.trainer, name, self._as_part(part, getattr(self.trainer, name)))

    def _as_part(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before, Step.part, begun = Step.part, part, clock(self.size.device)
            try:
                return run(*args, **kwargs)
            finally:
                Step.part = before
                self.seconds[part] = self.seconds.get(part, 0.0) + clock(self.size.device) - begun

        return wrapped

    def requests(self) -> list[Request]:
        g, n = torch.Generator().manual_seed(self.version), self.size.samples
        made = []
        for i in range(self.size.responses // n):
            length = int(torch.randint(12, 30, (1,), generator=g))
            prompt = tuple(torch.randint(2, 32, (length,), generator=g).tolist())
            for j in range(n):
                sampling = SamplingParams(1.0, 1.0, self.size.tokens, (STOP,), seed=i * n + j)
                made.append(Request(f"{self.version}-{i}-{j}", prompt, sampling))
        return made

    def rollout(self) -> list[Trajectory]:
        return self.engine.generate(self.requests())

    def update(self, trajectories: list[Trajectory]) -> None:
        g = torch.Generator().manual_seed(self.version)
        for i, t in enumerate(trajectories):
            t.group, t.reward = i // self.size.samples, float(torch.rand((), generator=g) < 0.3)
        self.trainer.update(RolloutBatch(trajectories, self.version))
        self.store.discard([t.guidance for t in trajectories if t.guidance is not None])

    def publish(self) -> None:
        self.version = self.trainer.version
        self.engine.update_weights(self.trainer.named_weights(), self.version)


def clock(device: str) -> float:
    """Seconds. Of this process on the CPU, where another may be running; by the wall on a GPU, behind its work."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


Watch = Callable[[str], Any]
"""Of a part's name, a context to run it in."""


def run_parts(step: Step, watch: Watch) -> None:
    with watch("rollout"):
        trajectories = step.rollout()
    with watch("update"):
        step.update(trajectories)
    with watch("publish"):
        step.publish()


def counted(step: Step) -> dict[str, Any]:
    found: dict[str, Any] = {}

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        with Counts() as c:
            yield
        found[part] = {
            "operations": sum(c.operations.values()), "kernels": sum(c.kernels.values()), "views": c.views,
            "sent": c.sent, "asks": sum(c.places.values()), "places": dict(c.places.most_common(12)),
            "by part": dict(c.by_part), "most frequent": dict(c.operations.most_common(12)),
            "by kernel": dict(c.kernels),
        }  # fmt: skip

    run_parts(step, watch)
    return found


def timed(step: Step, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {}

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        begun = clock(step.size.device)
        yield
        seconds.setdefault(part, []).append(clock(step.size.device) - begun)

    for _ in range(rounds):
        step.seconds.clear()
        run_parts(step, watch)
        for part, own in step.seconds.items():
            seconds.setdefault(f"update: {part}", []).append(own)
        gc.collect()
    return seconds


def profiled(step: Step, top: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        profile = cProfile.Profile()
        profile.enable()
        yield
        profile.disable()
        stats = pstats.Stats(profile)
        rows = [(s[2], s[3], s[1], where) for where, s in stats.stats.items()]  # type: ignore[attr-defined]
        ours = [r for r in rows if r[3][0].startswith(SOURCE)]
        lists = (sorted(rows, reverse=True), sorted(ours, key=lambda r: -r[1]))
        found[part] = [
            f"{own * 1e3:8.1f} {whole * 1e3:8.1f} ms {calls:7d} x {_function(where)}"
            for chosen in lists
            for own, whole, calls, where in chosen[:top]
        ]

    run_parts(step, watch)
    return found


def _function(where: tuple[str, int, str]) -> str:
    file, line, name = where
    return name if file == "~" else f"{'/'.join(Path(file).parts[-2:])}:{line} {name}"


def on_the_device(step: Step, top: int) -> dict[str, Any]:
    """Of a GPU: waits of the host by place, launches, and the device's time by kernel."""
    found: dict[str, Any] = {}

    @contextmanager
    def watch(part: str) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            yield
            torch.cuda.synchronize()
        rows = [(e.self_device_time_total, e.count, e.key) for e in profile.key_averages()]
        rows = [r for r in rows if r[0]]
        host = {e.key: e.count for e in profile.key_averages() if "aunch" in e.key}
        found[part] = {
            "device ms": sum(r[0] for r in rows) / 1e3, "launches": host,
            "device time": [f"{t / 1e3:8.2f} ms {n:6d} x {key[:90]}" for t, n, key in sorted(rows, reverse=True)[:top]],
        }  # fmt: skip

    @contextmanager
    def waits(part: str) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        torch.cuda.set_sync_debug_mode("default")
        places = Counter(f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in caught)
        found[part]["waits"] = dict(places.most_common(top))

    run_parts(step, watch)
    run_parts(step, waits)
    return found


def measure(mode: str, size: argparse.Namespace) -> dict[str, Any]:
    step = Step(mode, size)
    run_parts(step, lambda part: ExitStack())  # compiles, captures, first touches
    found: dict[str, Any] = {}
    seconds = timed(step, size.rounds)
    found["seconds"] = {part: {"median": statistics.median(s), "all": s} for part, s in seconds.items()}
    if size.device == "cuda":
        found["device"] = on_the_device(step, size.top)
    else:
        found["counts"] = counted(step)
    found["functions"] = profiled(step, size.top)
    return found


def show(mode: str, found: dict[str, Any], top: int) -> None:
    for part, seconds in found["seconds"].items():
        print(f"{mode:10s} {part:24s} {seconds['median'] * 1e3:8.1f} ms", end="")
        if part.startswith("update:"):
            pass
        elif "counts" in found:
            c = found["counts"][part]
            print(f"  {c['operations']} operations, {c['kernels']} kernels, {c['views']} views", end="")
            print(f", {c['sent']} sent, {c['asks']} asks", end="")
        else:
            d = found["device"][part]
            print(f"  device {d['device ms']:.1f} ms, {d['launches']}, waits {sum(d['waits'].values())}", end="")
        print()
    for part in ("rollout", "update") if top else ():
        what = found.get("counts", found.get("device"))[part]
        for name in ("by part", "places", "most frequent", "by kernel", "waits"):
            if what.get(name):
                print(f"  {part}, {name}: " + ", ".join(f"{k} {v}" for k, v in what[name].items()))
        print(*(f"    {line}" for line in what.get("device time", [])), sep="\n")
        print(f"  {part}, by function (own, whole time), then the package's own by whole time:")
        print(*(f"    {line}" for line in found["functions"][part]), sep="\n")
    sys.stdout.flush()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--samples", type=int, default=16, help="responses of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of a response; on the CPU 1 in 32 ends it")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds")
    parser.add_argument("--top", type=int, default=15, help="lines of a list, 0: the summary alone")
    parser.add_argument("--out", type=Path, help="file for all of it, JSON")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    size = parse(arguments)
    torch.set_num_threads(1 if size.device == "cpu" else torch.get_num_threads())
    found = {}
    for mode in size.modes.split(","):
        with on_a_cpu() if size.device == "cpu" else ExitStack():
            found[mode] = measure(mode, size)
        show(mode, found[mode], size.top)
        if size.out is not None:
            size.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
