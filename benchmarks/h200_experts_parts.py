"""What the products of FP4 experts spend their time on: a part of their work taken away at a time, on one GPU.

    PYTHONPATH=src python benchmarks/h200_experts_parts.py --out DIR [--tokens 484]

A variant is a copy of the sources in which a few lines of `triton_products.py` are others: its results are wrong, and
what it takes less than the kernels as they are is what the part costs beside the rest. Each is timed in a process of
its own, one after the other, gate and up with SiLU apart from down, at Qwen3-30B-A3B's sizes; the kernels as they are
also over twice and four times the inputs, which says what of a call does not grow with them. Medians of 30 with a cold
L2; DIR/parts.json is written after every variant.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PRODUCTS = Path("tracefp4/kernels/grouped_experts/triton_products.py")
AS_THEY_ARE = "as they are"
Edit = tuple[str, str]

_ONE_STRIP = "    real_more, at_more, more = real, at_x, acc\n"
_TWO_STRIPS = "        more = tl.zeros([BW, MORE], tl.float32)\n"
_UNPACKED = "w0, w1, w2, w3, w4, w5, w6, w7 = unpack(spread_columns(u, BW, 16), s, False, ASM)\n"
NO_ROWS: list[Edit] = [
    (", real, real_more, MORE)", ", nobody, nobody_more, MORE)"),
    (_ONE_STRIP, f"{_ONE_STRIP}    nobody = real & (stop < 0)\n    nobody_more = nobody\n"),
    (_TWO_STRIPS, f"{_TWO_STRIPS}        nobody_more = real_more & (stop < 0)\n"),
]
TWO_TILES: list[Edit] = [("words + t * (O * 16) + at_w", "words + (t & 1) * (O * 16) + at_w")]
ONE_MATRIX: list[Edit] = [(_UNPACKED, f"{_UNPACKED}        w1, w2, w3, w4, w5, w6, w7 = w0, w0, w0, w0, w0, w0, w0\n")]
VARIANTS: dict[str, list[Edit]] = {
    AS_THEY_ARE: [],
    "no rows of x": NO_ROWS,
    "two tiles of weights": TWO_TILES,
    "neither": NO_ROWS + TWO_TILES,
    "one matrix of eight unpacked": ONE_MATRIX,
    "none of the three": NO_ROWS + TWO_TILES + ONE_MATRIX,
}
"""Changes of the sources, by what is left out: loads of x (all masked), weights from memory, unpacking."""


def write_variant(src: Path, edits: list[Edit]) -> None:
    """Raises ValueError where the sources no longer have a text that is to be changed."""
    path = src / PRODUCTS
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        if old not in text:
            raise ValueError(f"{PRODUCTS.name} no longer has {old.strip()!r}")
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")


def product(tokens: int, gated: bool, inputs: int) -> Callable[[], Any]:
    """Gate and up, or down, of a layer of random weights over so many inputs, of rows that are laid out already."""
    from tracefp4.bench import experts
    from tracefp4.kernels.grouped_experts import triton as kernel

    device, E, K = torch.device("cuda"), experts.EXPERTS, experts.TOP
    M = tokens * K
    config = kernel.default_config(True, M / E)
    routing = kernel.route(experts.choice(tokens, E, K)[0].to(device), E, config.rows)
    weights = experts._packed(E, 2 * experts.WIDTH if gated else experts.HIDDEN, inputs, device)
    rows = torch.randn(tokens if gated else M, inputs, device=device).bfloat16()
    operands = kernel.operand_rows(rows, "nvfp4", "row")
    return lambda: kernel.products(*operands, weights, routing, K, gated, M, config)


def time_variant(name: str, tokens: int) -> dict[str, float]:
    """Microseconds by product and number of its inputs."""
    from tracefp4.bench import experts
    from tracefp4.bench.registry import Timer

    timer = Timer(torch.device("cuda"), 30)
    found: dict[str, float] = {}
    for factor in (1, 2, 4) if name == AS_THEY_ARE else (1,):
        for what, gated, inputs in (("gate and up", True, experts.HIDDEN), ("down", False, experts.WIDTH)):
            found[f"{what}, {factor * inputs} inputs"] = timer(product(tokens, gated, factor * inputs))[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=484)
    parser.add_argument("--commit", help="commit to write into the results, where there is no git checkout")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # by a child, over its own sources
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU: what a kernel waits for is measured on one", file=sys.stderr)
        return 2
    if args.variant is not None:
        print(json.dumps(time_variant(args.variant, args.tokens)))
        return 0
    from tracefp4.bench.registry import environment

    args.out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {"environment": environment(torch.device("cuda"), args.commit), "tokens": args.tokens}
    document["us"] = {}
    for name, edits in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            src = Path(folder, "src")
            shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
            write_variant(src, edits)
            own = ["--out", str(args.out), "--tokens", str(args.tokens), "--variant", name]
            command = [sys.executable, __file__, *own]
            child = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(src)}, capture_output=True, text=True)
        if child.returncode:
            print(f"{name}: {child.stderr.strip()}", file=sys.stderr)
            return 1
        document["us"][name] = json.loads(child.stdout.splitlines()[-1])
        print(name, *(f"{what} {us:.1f} us" for what, us in document["us"][name].items()), sep="; ", flush=True)
        (args.out / "parts.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
