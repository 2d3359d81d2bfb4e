"""The tables of `tracefp4 plan`, from its plain dictionary."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def guidance_table(plan: dict[str, Any], *, transposed: bool = False) -> Table:
    """A row per mode: bytes a token, a trajectory and a step, and the time to move a step's.

    transposed: a column per mode, for a narrow terminal.
    """
    columns = [
        ("mode", lambda g: g["mode"]),
        ("bits", lambda g: f"{g['bits']:g}"),
        ("layers", lambda g: str(g["guided_layers"])),
        ("activations/token", lambda g: size(g["activation_bytes_per_token"])),
        ("KV/token", lambda g: size(g["kv_bytes_per_token"])),
        ("payload/token", lambda g: size(g["payload_bytes_per_token"])),
        ("overhead/token", lambda g: f"{size(g['overhead_bytes_per_token'])} ({g['overhead_share']:.1%})"),
        ("trajectory", lambda g: size(g["bytes_per_trajectory"])),
        ("step", lambda g: size(g["bytes_per_step"])),
        (f"at {plan['link_gb_per_s']:g} GB/s", lambda g: duration(g["link_seconds"])),
        (f"at {plan['disk_gb_per_s']:g} GB/s", lambda g: duration(g["disk_seconds"])),
    ]
    title = (
        f"Guidance of {plan['model']}: {plan['layers']} layers, {plan['moe_layers']} with experts, "
        f"{plan['attention_layers']} with a KV cache; "
        f"{plan['trajectories']:,} trajectories of {plan['context']:,} tokens"
    )
    rows = [[name for name, _ in columns], *([cell(g) for _, cell in columns] for g in plan["guidance"])]
    return _table(title, [list(column) for column in zip(*rows, strict=True)] if transposed else rows)


def capacity_table(plan: dict[str, Any]) -> Table:
    """What a cache holds beside the weights within the memory budget."""
    rows = [["weights", "KV", "bytes of weights", "KV/token", "tokens", f"sequences of {plan['context']:,}"]]
    for c in plan["capacity"]:
        counts = ["any number" if c[key] is None else f"{c[key]:,}" for key in ("tokens", "sequences")]
        rows.append([c["weights"], c["kv"], size(c["weight_bytes"]), size(c["kv_bytes_per_token"]), *counts])
    return _table(f"KV capacity in {plan['memory_gb']:g} GB ({size(plan['memory_gb'] * 1e9)})", rows)


def _table(title: str, rows: list[list[str]]) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for index, heading in enumerate(rows[0]):
        table.add_column(Text(heading), justify="left" if index == 0 else "right")
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def size(count: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1: "50.6 KiB"."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count /= 1024
        power += 1
    return f"{count:.3g} {units[power]}" if count < 1000 else f"{count:.0f} {units[power]}"


def duration(seconds: float) -> str:
    """ "45 s", "3.1 min", "3.1 h": two digits are enough to plan with."""
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
