"""Guidance records for tests of the stores: random, a function of (seed, sizes) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import ShardStore
from tracefp4.guidance.files import Files, Range
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.types import GuidanceHandle

WIDTHS = {"expert_input": 10, "key": 6, "value": 6}


def make_record(
    seed: int = 0,
    rows: int = 5,
    layers: tuple[int, ...] = (1, 3),
    pow2: bool = True,
    version: int = 2,
    widths: dict[str, int] = WIDTHS,
    recipe_hash: str = "abc",
) -> TrajectoryGuidance:
    """Row scales for expert_input (powers of two or any), a static one for key, none for value."""
    g = torch.Generator().manual_seed(seed)

    def payload(width: int) -> Tensor:
        return torch.randint(0, 256, (len(layers), rows, width), dtype=torch.uint8, generator=g)

    exponents = torch.randint(-20, 20, (len(layers), rows), generator=g).float()
    scale = torch.exp2(exponents) if pow2 else torch.rand(len(layers), rows, generator=g) + 1
    static: dict[str, Tensor | None] = {"expert_input": scale, "key": torch.tensor(1.7), "value": None}
    sites = {site: SiteRows(payload(width), static[site]) for site, width in widths.items()}
    tokens = torch.randint(0, 1000, (rows,), dtype=torch.int32, generator=g)
    versions = torch.full((rows,), version, dtype=torch.int32)
    valid = torch.rand(rows, generator=g) > 0.3
    return TrajectoryGuidance(recipe_hash, 1.125, layers, sites, tokens, versions, valid)


def equal(a: TrajectoryGuidance, b: TrajectoryGuidance) -> bool:
    """Whether two records agree in every byte and field."""
    if (a.recipe_hash, a.bits, a.layers, list(a.sites)) != (b.recipe_hash, b.bits, b.layers, list(b.sites)):
        return False
    pairs: list[tuple[Any, Any]] = [(a.token_ids, b.token_ids), (a.versions, b.versions), (a.valid, b.valid)]
    for site in a.sites:
        pairs.append((a.sites[site].payload, b.sites[site].payload))
        pairs.append((a.sites[site].encode_scale, b.sites[site].encode_scale))
    return all(x is y if x is None or y is None else x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


class CountingFiles:
    """Files that count the bytes read from them."""

    def __init__(self, files: Files) -> None:
        self._files, self.bytes_read = files, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def fill(self, name: str, ranges: Sequence[Range]) -> Iterator[int]:
        self.bytes_read += sum(len(memory) for _, memory in ranges)
        return self._files.fill(name, ranges)


def put_all(store: ShardStore, count: int, first: int = 0, **sizes: Any) -> list[GuidanceHandle]:
    """Records s<i> of seed i; every one must be taken."""
    handles = [store.put(f"s{i}", make_record(i, **sizes)) for i in range(first, first + count)]
    assert all(handles)
    return [h for h in handles if h is not None]


def shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def is_missing(store: ShardStore, handle: GuidanceHandle) -> bool:
    """Whether a record is missing, and not damaged or another one."""
    with pytest.raises(GuidanceError) as caught:
        store.get(handle)
    return str(caught.value).startswith("missing: ")
