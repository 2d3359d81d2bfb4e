"""How far apart the two paths' slots are, per site and layer, before and after guidance (diagnostics)."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from tracefp4.formats import QuantizedBlocks, get_format
from tracefp4.guidance import CompactGuidance, decode


def slot_index(codes: Tensor, element_bits: int = 4) -> Tensor:
    """Codes 0..15 -> signed slot -7..7 along the E2M1 grid (both zeros are 0); E4M3 bytes likewise -127..127."""
    sign_bit = 1 << (element_bits - 1)
    magnitude = (codes & (sign_bit - 1)).short()
    return torch.where(codes >= sign_bit, -magnitude, magnitude)


Totals = tuple[list[int], dict[tuple[str, int], dict[str, float]]]
"""([rows whose experts differ, rows], sums by (site, layer)) of a SiteObserver."""


class SiteObserver:
    """Sums over observed values, by (site, layer); ``metrics`` turns them into rates.

    Rates are over values: ``code_mismatch`` counts slots that differ (the two zeros are one slot),
    ``one_slot`` the share of those one slot apart at the same scale, ``up`` the share of them where the trainer's
    slot is the larger. ``scale_mismatch`` is over blocks. ``d_act`` is ||Q_train - Q_roll||_F / ||Q_roll||_F.
    Sums stay on the device until ``metrics``, in FP64: asked for one by one, each would have the host wait.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], dict[str, Tensor | float]] = defaultdict(lambda: defaultdict(float))
        self._routing: list[Tensor | int] = [0, 0]

    def observe(
        self,
        site: str,
        layer: int,
        x_nK: Tensor,
        rollout: CompactGuidance,
        used: CompactGuidance | None,
        own_encode_scale: str | float | None,
        rule: str,
        applied: bool = True,
        band: float | None = None,
    ) -> None:
        """x f32/bf16 [n, K]: the trainer's values; rollout: full-width record of the same rows; used: the compact
        record the forward rounds by (None: nearest); applied: whether the forward rounds here at all, without which
        there is no "after"."""
        keep = rollout.valid
        if not bool(keep.any()):
            return
        rows = keep.nonzero()[:, 0]
        x, rollout = x_nK[rows], rollout.select(rows)
        truth, _ = decode(rollout, x)
        fmt = get_format(truth.format)
        own = fmt.quantize(x, encode_scale=own_encode_scale)
        after = own
        if used is not None:
            after, _ = decode(used.select(rows), x, rule, own_encode_scale=own_encode_scale, band=band)
        s = self._sums[site, layer]
        s["values"] += x.numel()
        s["blocks"] += truth.scales.numel()
        truth_values = fmt.dequantize(truth)
        s["norm2"] += truth_values.double().pow(2).sum()
        self._compare(s, "before", truth, truth_values, own)
        if applied:
            self._compare(s, "after", truth, truth_values, after)

    @staticmethod
    def _compare(
        s: dict[str, Tensor | float], when: str, truth: QuantizedBlocks, truth_values: Tensor, mine: QuantizedBlocks
    ) -> None:
        bits = truth.element_bits
        step = slot_index(mine.unpacked_codes(), bits) - slot_index(truth.unpacked_codes(), bits)
        differs = step != 0
        scale_differs = mine.scales != truth.scales
        s[f"differ/{when}"] += differs.sum().double()
        s[f"scale/{when}"] += scale_differs.sum().double()
        same_scale = ~scale_differs.repeat_interleave(truth.block_size, dim=-1)
        near = differs & same_scale
        s[f"near/{when}"] += near.sum().double()
        s[f"one_slot/{when}"] += (near & (step.abs() == 1)).sum().double()
        s[f"up/{when}"] += (near & (step > 0)).sum().double()
        values = get_format(mine.format).dequantize(mine)
        s[f"d2/{when}"] += (values - truth_values).double().pow(2).sum()

    def observe_routing(self, own_NK: Tensor, replayed_NK: Tensor, valid_N: Tensor) -> None:
        """Counts valid rows whose top-k set differs from the rollout's; int64 [N, K] each, bool [N]."""
        same = (own_NK.sort(-1).values == replayed_NK.sort(-1).values).all(-1)
        # Sums over all rows: taking the valid ones would have the host wait for their number.
        self._routing[0] += (valid_N & ~same).sum()
        self._routing[1] += valid_N.sum()

    def totals(self) -> Totals:
        """What the rates are made of, as numbers that other processes' can be added to."""
        sites = {where: {k: float(v) for k, v in sums.items()} for where, sums in self._sums.items()}
        return [int(n) for n in self._routing], sites

    def add(self, totals: Totals) -> None:
        routing, sites = totals
        self._routing = [a + b for a, b in zip(self._routing, routing, strict=True)]
        for where, sums in sites.items():
            for k, v in sums.items():
                self._sums[where][k] += v

    def metrics(self) -> dict[str, float]:
        """``code_mismatch/{before,after}[/site/layer]`` and the other rates; empty where nothing was observed."""
        out: dict[str, float] = {}
        differ, rows = (int(n) for n in self._routing)
        if rows:
            out["router/topk_disagreement"] = differ / rows
        if not self._sums:
            return out
        total: dict[str, float] = defaultdict(float)
        for (site, layer), sums in sorted(self._sums.items()):
            s = {k: float(v) for k, v in sums.items()}
            for k, v in s.items():
                total[k] += v
            for name, value in self._rates(s).items():
                out[f"{name}/{site}/layer{layer}"] = value
        return out | self._rates(total)

    @staticmethod
    def _rates(s: dict[str, float]) -> dict[str, float]:
        out = {}
        for when in ("before", "after"):
            if f"differ/{when}" not in s:
                continue
            out[f"code_mismatch/{when}"] = s[f"differ/{when}"] / s["values"]
            out[f"scale_mismatch/{when}"] = s[f"scale/{when}"] / s["blocks"]
            out[f"d_act/{when}"] = (s[f"d2/{when}"] / s["norm2"]) ** 0.5 if s["norm2"] else 0.0
        if s["near/before"]:
            out["code_mismatch/one_slot"] = s["one_slot/before"] / s["near/before"]
            out["code_mismatch/up"] = s["up/before"] / s["near/before"]
        return out
