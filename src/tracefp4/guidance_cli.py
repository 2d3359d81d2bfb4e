"""`tracefp4 guidance inspect | verify | stats | prune`: a guidance store from the outside."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from tracefp4.errors import TracefpError

app = typer.Typer(help="Look into, check and prune a guidance store.", no_args_is_help=True)

Url = Annotated[str, typer.Argument(metavar="URL", help="A folder, or an fsspec URL.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def inspect(url: Url, as_json: Json = False) -> None:
    """List the samples: rows, layers, bits, recipe, policy versions, age."""
    from tracefp4.guidance.inspection import inspect as run

    found = run(url)
    if as_json:
        _print_json(found)
        return
    print(f"{found['url']}: {found['shards']} shards, {len(found['samples'])} samples")
    lines: list[tuple[str, ...]] = [("sample", "rows", "layers", "bits", "sites", "recipe", "versions", "age")]
    for s in found["samples"]:
        lines.append(
            (
                s["sample"],
                str(s["rows"]),
                _layers(s["layers"]),
                f"{s['bits']:g}",
                ",".join(s["sites"]),
                s["recipe_hash"],
                "-".join(str(v) for v in dict.fromkeys(s["versions"])),
                _age(s["age_seconds"]),
            )
        )
    _print_table(lines if len(lines) > 1 else [])
    _print_stores_below(url)
    for error in found["damaged_shards"].values():
        print(error)


@app.command()
def verify(url: Url, as_json: Json = False) -> None:
    """Read and check every byte; name what is damaged, exit code 1 where anything is or where there is no shard."""
    from tracefp4.guidance.inspection import verify as run

    found = run(url)
    if as_json:
        _print_json(found)
    else:
        for damage in found["damaged"]:
            print(damage["error"])
        print(
            f"{found['url']}: {found['samples']} samples in {found['shards']} shards are whole, "
            f"{_size(found['bytes'])} read, {len(found['damaged'])} damaged"
        )
    if not found["shards"] and not as_json:
        print("there is nothing to verify: is this the right folder? A run removes what it has learned from.")
        _print_stores_below(url)
    if found["damaged"] or not found["shards"]:
        raise typer.Exit(1)


@app.command()
def stats(url: Url, as_json: Json = False) -> None:
    """Bytes per site and row, overhead, ages."""
    from tracefp4.guidance.inspection import stats as run

    found = run(url)
    if as_json:
        _print_json(found)
        return
    print(f"{found['url']}: {found['shards']} shards, {found['samples']} samples, {found['rows']} rows")
    print(
        f"{_size(found['bytes'])}, {found['bytes_per_row']:.1f} bytes a row; headers, encode scales, token ids and "
        f"checksums are {found['overhead_percent']:.2f} % over the packed rows"
    )
    for site, data in found["sites"].items():
        bits = ", ".join(f"{b:g}" for b in data["bits_per_value"])
        print(f"{site}: {bits} bits a value, {data['bytes_per_row_and_layer']:g} bytes a row and layer")
    if found["versions"]:
        oldest, newest = found["versions"]
        print(
            f"policy versions {oldest} to {newest}; {_age(found['oldest_seconds'])} to "
            f"{_age(found['newest_seconds'])} old"
        )
    _print_stores_below(url)
    if found["damaged_shards"]:
        print(f"{len(found['damaged_shards'])} shards have a damaged header: tracefp4 guidance verify {url}")


@app.command()
def prune(
    url: Url,
    keep_bytes: Annotated[
        str | None,
        typer.Option(metavar="N", help="Remove the oldest shards beyond N bytes (K, M, G, T: powers of 1024)."),
    ] = None,
    keep_versions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Remove shards older than the N newest policy versions.")
    ] = None,
    temp: Annotated[bool, typer.Option("--temp", help="Remove what dead writers left half-written.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old shards; runs may write and read meanwhile."""
    from tracefp4.guidance.inspection import prune as run

    if keep_bytes is None and keep_versions is None and not temp:
        raise TracefpError("nothing to prune: give --keep-bytes, --keep-versions or --temp")
    found = run(url, None if keep_bytes is None else parse_size(keep_bytes), keep_versions, temp)
    if as_json:
        _print_json(found)
        return
    shards, temps = len(found["removed_shards"]), len(found["removed_temps"])
    print(f"{url}: removed {shards} shards and {temps} unfinished files")
    _print_stores_below(url)


def _print_stores_below(url: str) -> None:
    from tracefp4.guidance.inspection import stores_below

    if names := stores_below(url):
        print(f"no shard lies here; below are the stores {', '.join(names)}: name one of them")


def parse_size(text: str) -> int:
    """'1500', '20G' to bytes. Raises TracefpError for anything else."""
    units = {"K": 10, "M": 20, "G": 30, "T": 40}
    digits, shift = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 0)
    if not (digits.isascii() and digits.isdigit()):
        raise TracefpError(f"--keep-bytes must be a number of bytes such as 1500 or 20G, got '{text}'")
    return int(digits) << shift


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2))


def _print_table(lines: list[tuple[str, ...]]) -> None:
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _layers(layers: list[int]) -> str:
    """'20-39' for a run of layers, else their list."""
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(str(layer) for layer in layers)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _size(nbytes: float) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.2f} {unit}"
    return f"{nbytes:.0f} bytes"
