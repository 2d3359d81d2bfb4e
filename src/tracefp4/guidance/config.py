"""Settings of the store."""

from __future__ import annotations

from pydantic import Field

from tracefp4.config import StrictModel


class GuidanceStoreConfig(StrictModel):
    """Where guidance lives between rollout and trainer.

    url: "memory" (this process), a folder, or an fsspec URL such as s3://bucket/run. queue_mb: most MiB of finished
    records that wait for the disk; beyond it new guidance is dropped. wait_seconds: how long a reader waits for a
    record that is not there yet. keep_gb: most GiB of shards kept, the oldest go first; 0 keeps all. fsync: also
    survive a power failure, not only the end of the process; without it a torn shard is found by its checksums.
    """

    url: str = Field("memory", min_length=1)
    queue_mb: int = Field(512, ge=1)
    wait_seconds: float = Field(0.2, ge=0)
    keep_gb: float = Field(0.0, ge=0)
    fsync: bool = False
