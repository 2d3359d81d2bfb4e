"""The clock and the power of a GPU while something is timed: at its power limit a GPU slows its multiprocessors."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import torch

PERIOD_MS, PATIENCE_S = 50, 5.0


@dataclass
class Clocks:
    """Medians over the samples. sm_mhz: of the multiprocessors; watts: drawn; limited: share of the samples in which
    the driver held the clock down for power or heat. All None where nvidia-smi is missing or has said nothing."""

    sm_mhz: float | None = None
    watts: float | None = None
    limited: float | None = None

    def __str__(self) -> str:
        if self.sm_mhz is None or self.watts is None:
            return ""
        return f"{self.sm_mhz:.0f}, {self.watts:.0f}" + (", held down" if (self.limited or 0) >= 0.5 else "")


# Of clocks_event_reasons.active: software power cap, hardware slowdown and its two kinds, software thermal slowdown.
_LIMITED = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@contextmanager
def sampled(device: torch.device) -> Iterator[Clocks]:
    """Samples a CUDA device every 50 ms by nvidia-smi while the block runs; the result is filled in when it ends.

    On a CPU, or where nvidia-smi does not answer, the result stays empty: a measurement does not fail for want of it.
    """
    found = Clocks()
    if device.type != "cuda":
        yield found
        return
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with tempfile.TemporaryFile("w+") as out, _asking(uuid, out) as begun:
        yield found
        out.seek(begun)
        read(out.read(), found)


@contextmanager
def _asking(uuid: str, out: IO[str]) -> Iterator[int]:
    """nvidia-smi writes samples while the block runs; yields where those behind its first one begin.

    It takes up to a second until it answers, which is as long as what is timed.
    """
    query = "--query-gpu=clocks.sm,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", "-i", uuid, query, "--format=csv,noheader,nounits", "-lms", str(PERIOD_MS)]
    try:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
    except OSError:
        yield 0
        return
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (begun := os.fstat(out.fileno()).st_size) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        yield begun
    finally:
        process.terminate()
        process.wait()


def read(text: str, found: Clocks) -> None:
    """Fills in what nvidia-smi has written, a line a sample: MHz, W, reasons as a hexadecimal mask."""
    samples: list[tuple[float, float, bool]] = []
    for line in text.splitlines():
        try:
            mhz, watts, reasons = line.split(",")
            samples.append((float(mhz), float(watts), bool(int(reasons, 16) & _LIMITED)))
        except ValueError:  # the last line may be cut off, and a card may not tell its power
            continue
    if samples:
        found.sm_mhz = statistics.median(s[0] for s in samples)
        found.watts = statistics.median(s[1] for s in samples)
        found.limited = sum(s[2] for s in samples) / len(samples)
