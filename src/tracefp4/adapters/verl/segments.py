"""A sequence that was generated in pieces: which piece's record each of its rows is read from.

A response is generated in pieces where verl aborts it and resumes it after a weight update, or turn by turn. Every
piece is a request of its own: the engine prefills what came before, so its record covers all rows from 0. The pieces
divide the sequence, in order: a piece owns the rows from where the one before it ended to its own last row, that is,
the rows whose logits chose its tokens, and before them those of the user's or a tool's tokens that it prefilled.

Expert inputs and routing of a row come from its owner: the pass that computed the row's logits. K and V of a row are
read by all later rows, of every later piece, and a piece after a weight update computed them anew: no single record is
right for all readers. They come from the piece whose sampled tokens read them most often (docs/verl.md has figures).

Legend: L tokens of one sequence, M layers with routed experts, K experts per token, G guided layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tracefp4.guidance import GuidanceError
from tracefp4.guidance.store import SiteRows, TrajectoryGuidance
from tracefp4.train.slices import MicroBatchBuilder, RowCounts, fetch, usable_rows
from tracefp4.types import GuidanceHandle, TrainBatch, Trajectory


@dataclass(frozen=True)
class Segment:
    """Rows [start, stop) of a sequence, and the record of the piece that owns them.

    first: position of the first token that the piece sampled; its last is the one at ``stop``. versions: int [stop],
    the policy version under which the piece forwarded each row from 0 on. handle: of its record, whose row i is the
    sequence's row i; None where the piece recorded nothing.
    """

    start: int
    stop: int
    first: int
    sample: str
    versions: tuple[int, ...]
    handle: GuidanceHandle | None

    @property
    def own_versions(self) -> tuple[int, ...]:
        return self.versions[self.start :]

    def clip(self, start: int, stop: int) -> Segment:
        """The part of it within [start, stop)."""
        start, stop = max(start, self.start), min(stop, self.stop)
        return replace(self, start=start, stop=stop, versions=self.versions[:stop])

    def readers(self, rows: np.ndarray) -> np.ndarray:
        """How many of its sampled tokens read K and V of each row (int [n]), the row's own next token among them."""
        return np.clip(self.stop - np.maximum(self.first - 1, rows), 0, None)

    def pack(self) -> list[Any]:
        """Plain values that pickle: the fields, with versions as runs of [version, rows]."""
        runs = [[version, len(list(rows))] for version, rows in groupby(self.versions)]
        h = self.handle
        handle = None if h is None else [h.sample_id, h.rows, h.recipe_hash, h.nbytes]
        return [self.start, self.stop, self.first, self.sample, runs, handle]

    @staticmethod
    def unpack(packed: Sequence[Any]) -> Segment:
        start, stop, first, sample, runs, handle = packed
        versions = tuple(int(version) for version, rows in runs for _ in range(rows))
        return Segment(start, stop, first, str(sample), versions, None if handle is None else GuidanceHandle(*handle))


def make_note(trajectory: Trajectory, recipe_hash: str) -> dict[str, Any]:
    """What travels with a response: plain values that pickle, and handles in place of the guidance.

    recipe: hash. segments: as ``Segment.pack`` gives them; one, of the rows that the engine forwarded.
    """
    versions = trajectory.row_versions.tolist()
    rows = next((i for i, version in enumerate(versions) if version < 0), len(versions))
    first = len(trajectory.prompt_ids)
    whole = Segment(0, rows, first, trajectory.request_id, tuple(versions[:rows]), trajectory.guidance)
    return {"recipe": recipe_hash, "segments": [whole.pack()]}


def read_note(note: Mapping[str, Any] | None, recipe_hash: str) -> list[Segment]:
    """The segments of a note, in order; none where there is no note.

    Raises GuidanceError where the rollout held another recipe than the trainer.
    """
    if note is None:
        return []
    segments = [Segment.unpack(packed) for packed in note["segments"]]
    if note["recipe"] != recipe_hash:
        sample = segments[0].sample if segments else "without rows"
        raise GuidanceError(
            f"sample {sample} was rolled out under recipe {note['recipe']}, the trainer holds "
            f"{recipe_hash}; start both from the same actor_rollout_ref.model.override_config.tracefp4"
        )
    return segments


@dataclass(frozen=True)
class Piece:
    """One request as the client saw it: tokens (prompt and what was generated), its note, its routing.

    tokens int [L], the last ``generated`` of them sampled. routed int16 [L - 1 - skipped, M, K] or None: of the rows
    from ``skipped`` on.
    """

    tokens: Sequence[int]
    generated: int
    note: Mapping[str, Any] | None
    routed: Any = None
    skipped: int = 0

    def after(self, earlier: Sequence[Piece]) -> Piece:
        """Without the routing that the piece before holds, which a session of many turns would hold many times.

        Only where this piece goes on from all of its tokens: whatever output has tokens of this one has those too.
        """
        last = earlier[-1] if earlier else None
        if last is None or self.routed is None or last.note is None or not last.generated:
            return self
        if _common_prefix(np.asarray(last.tokens), np.asarray(self.tokens)) < len(last.tokens):
            return self
        held = max((Segment.unpack(packed).stop for packed in last.note["segments"]), default=0)
        return replace(self, routed=np.asarray(self.routed)[held:].copy(), skipped=held)


@dataclass(frozen=True)
class Joined:
    """Of one sequence: note for the trainer (None where no piece had one), routing int16 [covered rows, M, K] or
    None, and the lowest and highest policy version of its rows (None where unknown)."""

    note: dict[str, Any] | None
    routed: Any
    versions: tuple[int, int] | None


def join_pieces(tokens: Sequence[int], pieces: Iterable[Piece]) -> Joined:
    """The segments of a sequence of L tokens, from the pieces that led to it, in the order they were generated.

    A piece counts as far as its tokens are the sequence's own, from the first on, if one that it sampled is among them:
    what an agent loop rewrote, cut off or gave to another output is owned by no piece. Raises GuidanceError for pieces
    of different recipes.
    """
    own = np.asarray(tokens)
    segments: list[Segment] = []
    routed: list[tuple[int, int, Piece]] = []
    recipe: str | None = None
    covered = 0
    for piece in pieces:
        if piece.note is None or not piece.generated:
            continue
        if recipe is not None and piece.note["recipe"] != recipe:
            raise GuidanceError(
                f"a response was rolled out under two recipes, {recipe} and {piece.note['recipe']}; start every "
                "replica from the same actor_rollout_ref.model.override_config.tracefp4"
            )
        recipe = piece.note["recipe"]
        same = _common_prefix(np.asarray(piece.tokens), own)
        if same <= len(piece.tokens) - piece.generated:
            continue
        same = min(same, len(own) - 1)
        added = [s.clip(covered, same) for s in map(Segment.unpack, piece.note["segments"])]
        added = [s for s in added if s.start < s.stop]
        if not added:
            continue
        segments += added
        routed.append((covered, added[-1].stop, piece))
        covered = added[-1].stop
    if recipe is None:
        return Joined(None, None, None)
    versions = [v for s in segments for v in s.own_versions]
    note = {"recipe": recipe, "segments": [s.pack() for s in segments]}
    return Joined(note, _join_routing(routed), (min(versions), max(versions)) if versions else None)


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _join_routing(parts: Sequence[tuple[int, int, Piece]]) -> Any:
    """Rows of each part's own range; -1 where a part has none. None where no part has any."""
    known = next((np.asarray(p.routed) for _, _, p in parts if p.routed is not None), None)
    if known is None:
        return None
    rows = []
    for start, stop, piece in parts:
        own = np.full((stop - start, *known.shape[1:]), -1, dtype=known.dtype)
        if piece.routed is not None:
            at = max(start, piece.skipped)
            held = np.asarray(piece.routed)[at - piece.skipped : stop - piece.skipped]
            own[at - start : at - start + len(held)] = held
        rows.append(own)
    return np.concatenate(rows)


# -- the trainer's side -----------------------------------------------------------------------------------------


@dataclass
class SegmentedTrajectory(Trajectory):
    """A trajectory whose rows are guided by the records of several pieces; ``guidance`` stays None.

    segments: in order, contiguous from row 0. Rows behind the last one have no record.
    """

    segments: tuple[Segment, ...] = field(default=())


def key_value_sources(segments: Sequence[Segment]) -> list[int]:
    """For each segment the index of the one whose record its rows' K and V come from: itself or a later one.

    That is the one whose sampled tokens read these rows most often, the later of two that read as often. Rows of one
    segment stay together, since a piece is only near the rollout where nearly all that it reads is its own. A piece
    that forwarded the rows under the same version computed the same K and V, so their owner's record serves.
    """
    sources = []
    for k, own in enumerate(segments):
        rows = np.arange(own.start, own.stop)
        reads = [int(s.readers(rows).sum()) for s in segments[k:]]
        best = k + len(reads) - 1 - int(np.argmax(reads[::-1]))
        same = segments[best].versions[own.start : own.stop] == own.own_versions
        sources.append(k if same else best)
    return sources


class SegmentBuilder(MicroBatchBuilder):
    """Builds micro-batches of SegmentedTrajectory; a segment that cannot be read costs its own rows alone."""

    sources = staticmethod(key_value_sources)

    def _records(
        self, batch: TrainBatch, version: int, counts: RowCounts
    ) -> tuple[list[TrajectoryGuidance | None], list[Tensor | None]]:
        joined = [self._join(t, version, counts) for t in batch.trajectories]
        return [record for record, _ in joined], [usable for _, usable in joined]

    def _stale(self, record: TrajectoryGuidance, trajectory: Trajectory, version: int) -> Tensor:
        """All but rows whose own piece forwarded them and all before them under this version: after a weight update a
        piece prefills anew what older ones recorded, and reads none of it."""
        stale = torch.ones(record.rows, dtype=torch.bool)
        for s in trajectory.segments if isinstance(trajectory, SegmentedTrajectory) else ():
            stale[s.start : s.stop] = s.versions.count(version) < len(s.versions)
        return stale

    def _join(self, t: Trajectory, version: int, counts: RowCounts) -> tuple[TrajectoryGuidance | None, Tensor | None]:
        segments = t.segments if isinstance(t, SegmentedTrajectory) else ()
        parts = [self._read(t, s, (s.start, s.stop), version, counts) for s in segments]
        counts.reasons["missing"] += t.num_rows - (segments[-1].stop if segments else 0)
        record = join_records([(len(usable), part) for part, usable in parts])
        if record is None:
            return None, None
        sources = [segments[k] for k in self.sources(segments)]
        moved = [(s, source) for s, source in zip(segments, sources, strict=True) if source is not s]
        if moved:
            record = replace(record, sites={site: _own_memory(data) for site, data in record.sites.items()})
        for s, source in moved:
            part, usable = self._read(t, source, (s.start, s.stop), version, RowCounts())
            if part is not None:
                _put_key_value(record, part, usable, s.start)
        return record, torch.cat([usable for _, usable in parts])

    def _read(
        self, t: Trajectory, segment: Segment, part: tuple[int, int], version: int, counts: RowCounts
    ) -> tuple[TrajectoryGuidance | None, Tensor]:
        """Rows [start, stop) of a segment's record, and which of them may guide."""
        record = fetch(self.store, segment.handle, t, self.recipe, counts, part)
        if record is None:
            return None, torch.zeros(part[1] - part[0], dtype=torch.bool)
        return record, usable_rows(record, t, version, self.max_version_diff, counts, part[0])


def join_records(parts: Sequence[tuple[int, TrajectoryGuidance | None]]) -> TrajectoryGuidance | None:
    """Records of consecutive rows as one; a part (rows, None) leaves invalid rows. None where no part has a record."""
    known = next((record for _, record in parts if record is not None), None)
    if known is None or len(parts) == 1:
        return known
    records = [_blank(known, rows) if record is None else record for rows, record in parts]
    sites = {}
    for site, data in known.sites.items():
        scale = data.encode_scale
        if scale is not None and scale.ndim:
            scale = torch.cat([_scale(r, site) for r in records], dim=1)
        sites[site] = SiteRows(torch.cat([r.sites[site].payload for r in records], dim=1), scale)
    return replace(
        known,
        sites=sites,
        token_ids=torch.cat([r.token_ids for r in records]),
        versions=torch.cat([r.versions for r in records]),
        valid=torch.cat([r.valid for r in records]),
    )


def _own_memory(data: SiteRows) -> SiteRows:
    scale = data.encode_scale
    return SiteRows(data.payload.clone(), None if scale is None else scale.clone())


def _put_key_value(record: TrajectoryGuidance, part: TrajectoryGuidance, usable: Tensor, start: int) -> None:
    """Usable rows of ``part``, in the place of the record's rows from ``start`` on."""
    for site in ("key", "value"):
        if site not in record.sites:
            continue
        here, there = record.sites[site], part.sites[site]
        rows = usable.nonzero()[:, 0]
        here.payload[:, start + rows] = there.payload[:, rows]
        if here.encode_scale is not None and there.encode_scale is not None and here.encode_scale.ndim:
            here.encode_scale[:, start + rows] = there.encode_scale[:, rows]


def _scale(record: TrajectoryGuidance, site: str) -> Tensor:
    scale = record.sites[site].encode_scale
    assert scale is not None
    return scale


def _blank(like: TrajectoryGuidance, rows: int) -> TrajectoryGuidance:
    sites = {}
    for site, data in like.sites.items():
        G, _, W = data.payload.shape
        scale = data.encode_scale
        if scale is not None and scale.ndim:
            scale = torch.ones(G, rows, dtype=scale.dtype)
        sites[site] = SiteRows(torch.zeros(G, rows, W, dtype=data.payload.dtype), scale)
    return replace(
        like,
        sites=sites,
        token_ids=torch.full((rows,), -1, dtype=like.token_ids.dtype),
        versions=torch.full((rows,), -1, dtype=like.versions.dtype),
        valid=torch.zeros(rows, dtype=torch.bool),
    )
