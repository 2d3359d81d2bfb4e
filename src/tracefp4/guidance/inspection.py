"""What is in a guidance store, whether it is whole, and what it costs: the work behind `tracefp4 guidance`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from typing import Any

from tracefp4.errors import TracefpError
from tracefp4.guidance.files import Files, open_files
from tracefp4.guidance.index import ShardIndex
from tracefp4.guidance.schema import GuidanceError
from tracefp4.guidance.shards import oldest_beyond, read_sample, shard_time


def open_index(url: str) -> tuple[Files, ShardIndex]:
    """The shards at a URL. Raises TracefpError where there is no folder, or none that can be listed."""
    files = open_files(url)
    index = ShardIndex(files)
    try:
        index.refresh()
    except OSError as error:
        raise TracefpError(f"there is no guidance store at {url}: {error.strerror or error}") from None
    return files, index


def stores_below(url: str) -> list[str]:
    """URLs of the folders in a folder without shards that hold some: a run's store lies below its ``guidance.url``.

    Raises TracefpError as ``open_index`` does.
    """
    files, index = open_index(url)
    if index.headers() or index.damaged():
        return []
    below = [f"{url.rstrip('/')}/{name}" for name in files.folders()]
    return [one for one in below if open_index(one)[1].headers()]


def inspect(url: str) -> dict[str, Any]:
    """Samples of every shard, and the store's totals, as plain JSON types."""
    _, index = open_index(url)
    now = time.time()
    samples = [
        {
            "sample": entry.sample_id,
            "rows": entry.rows,
            "layers": list(entry.layers),
            "bits": entry.bits,
            "sites": list(entry.scales),
            "recipe_hash": entry.recipe_hash,
            "versions": list(entry.versions),
            "age_seconds": round(now - shard_time(shard), 3),
            "shard": shard,
        }
        for shard, entry in index.samples()
    ]
    return {
        "url": url,
        "shards": len(index.headers()),
        "damaged_shards": {name: str(error) for name, error in index.damaged().items()},
        "samples": samples,
    }


def verify(url: str) -> dict[str, Any]:
    """Reads and checks every byte. "samples": how many are whole; "bytes": stored bytes of the shards read.

    "damaged": the shard, the sample (None where it is the header) and the reason of each damage. A shard that is
    removed meanwhile is no damage.
    """
    files, index = open_index(url)
    damaged = [{"shard": name, "sample": None, "error": str(error)} for name, error in index.damaged().items()]
    checked = 0
    for shard, entry in index.samples():
        try:
            read_sample(files, shard, entry)
        except FileNotFoundError:
            continue
        except (GuidanceError, OSError) as error:
            damaged.append({"shard": shard, "sample": entry.sample_id, "error": str(error)})
            continue
        checked += 1
    headers = index.headers()
    nbytes = sum(h.file_bytes for h in headers)
    return {"url": url, "shards": len(headers), "samples": checked, "bytes": nbytes, "damaged": damaged}


def stats(url: str) -> dict[str, Any]:
    """Bytes per site and row, overhead over the packed rows in percent, ages, versions."""
    _, index = open_index(url)
    payload: Counter[str] = Counter()
    row_layers: Counter[str] = Counter()
    bits: dict[str, set[float]] = defaultdict(set)
    rows = 0
    versions: list[int] = []
    for _, entry in index.samples():
        rows += entry.rows
        versions += entry.versions if entry.rows else ()
        for site in entry.scales:
            payload[site] += entry.payload_bytes(site)
            row_layers[site] += entry.rows * len(entry.layers)
            bits[site].add(entry.bits)
    headers = index.headers()
    stored, packed = sum(h.file_bytes for h in headers), sum(payload.values())
    times = [shard_time(h.name) for h in headers]
    now = time.time()
    return {
        "url": url,
        "shards": len(headers),
        "samples": sum(len(h.samples) for h in headers),
        "rows": rows,
        "bytes": stored,
        "payload_bytes": packed,
        "overhead_percent": 100 * (stored - packed) / packed if packed else 0.0,
        "bytes_per_row": stored / rows if rows else 0.0,
        "sites": {
            site: {
                "payload_bytes": payload[site],
                "bytes_per_row_and_layer": payload[site] / row_layers[site] if row_layers[site] else 0.0,
                "bits_per_value": sorted(bits[site]),
            }
            for site in sorted(payload)
        },
        "versions": [min(versions), max(versions)] if versions else [],
        "oldest_seconds": round(now - min(times), 3) if times else 0.0,
        "newest_seconds": round(now - max(times), 3) if times else 0.0,
        "damaged_shards": sorted(index.damaged()),
    }


def prune(
    url: str, keep_bytes: int | None = None, keep_versions: int | None = None, temp: bool = False
) -> dict[str, Any]:
    """Removes shards older than the keep_versions newest policy versions, then the oldest beyond keep_bytes.

    temp: also what dead writers left half-written. Runs may write and read meanwhile. Raises TracefpError where a file
    cannot be removed.
    """
    files, index = open_index(url)
    gone: list[str] = []
    try:
        if keep_versions is not None:
            newest = max((h.max_version for h in index.headers()), default=-1)
            gone += [h.name for h in index.headers() if h.max_version <= newest - keep_versions]
            for name in gone:
                files.remove(name)
        if keep_bytes is not None:
            for name in oldest_beyond(files.sizes(), keep_bytes):
                files.remove(name)
                gone.append(name)
        temps = files.remove_temps() if temp else []
    except OSError as error:
        raise TracefpError(f"the guidance store at {url} cannot be pruned: {error.strerror or error}") from None
    return {"url": url, "removed_shards": gone, "removed_temps": temps}
