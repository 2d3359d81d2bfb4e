"""Responses generated in pieces: over aborts and weight updates, over turns. Runs without verl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import make_engine, tiny_config, tiny_model, tiny_weights
from tracefp4.adapters.verl.guided import GuidedForward, Row
from tracefp4.adapters.verl.segments import (
    Joined,
    Piece,
    Segment,
    SegmentBuilder,
    join_pieces,
    key_value_sources,
    make_note,
    read_note,
)
from tracefp4.adapters.verl.settings import read_settings
from tracefp4.formats import get_format
from tracefp4.guidance import GuidanceError, decode
from tracefp4.guidance.disk import ShardStore
from tracefp4.nn import MicroBatch
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.types import GuidanceHandle, Request, SamplingParams, Trajectory

PROMPT = (5, 9, 3, 12, 7)


def generate(engine: RolloutEngine, name: str, prompt: Sequence[int], new: int, abort_after: int = 0) -> Trajectory:
    """One request of ``new`` tokens; abort_after: as soon as it has so many."""
    engine.add_request(Request(name, tuple(prompt), SamplingParams(max_new_tokens=new, seed=3)))
    for _ in range(abort_after):
        assert not engine.step()
    if abort_after:
        return engine.abort(name)
    while not (ended := engine.step()):
        pass
    return ended[0]


def piece(t: Trajectory, recipe_hash: str) -> Piece:
    return Piece(t.token_ids, len(t.response_ids), make_note(t, recipe_hash), t.routed_experts)


class Rolled:
    """A sequence, the trajectories it came from, and what the client and the trainer make of them."""

    def __init__(
        self, tokens: Sequence[int], parts: list[Trajectory], engine: RolloutEngine, store: ShardStore
    ) -> None:
        self.tokens, self.parts, self.hash = tuple(tokens), parts, engine.recipe.hash
        assert store.flush()
        self.store = store
        self.joined = join_pieces(self.tokens, [piece(t, self.hash) for t in parts])

    @property
    def segments(self) -> list[tuple[int, int]]:
        return [(s.start, s.stop) for s in read_note(self.joined.note, self.hash)]

    def row(self, joined: Joined | None = None) -> Row:
        joined = joined or self.joined
        routed = None if joined.routed is None else torch.as_tensor(joined.routed)
        return Row(torch.tensor(self.tokens), len(PROMPT), joined.note, routed)


def rolled_under_two_versions(store: ShardStore) -> Rolled:
    """Five of twelve tokens under version 0, an abort, and the others under version 1."""
    engine = make_engine("trace-all", store=store)
    first = generate(engine, "first", PROMPT, 12, abort_after=5)
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    second = generate(engine, "second", first.token_ids, 7)
    return Rolled(second.token_ids, [first, second], engine, store)


def rolled_in_two_turns(store: ShardStore, tool: tuple[int, ...] = (20, 21, 22)) -> Rolled:
    engine = make_engine("trace-all", store=store)
    first = generate(engine, "first", PROMPT, 4)
    second = generate(engine, "second", (*first.token_ids, *tool), 6)
    return Rolled(second.token_ids, [first, second], engine, store)


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(str(tmp_path / "g"))


def guided(store: ShardStore, **given: Any) -> GuidedForward:
    guidance = {"url": store.url, "wait_seconds": 0, **given}
    settings = read_settings({"model_config": {}, "tracefp4": {"method": "trace-all", "guidance": guidance}})
    assert settings is not None
    return GuidedForward(tiny_model(tiny_config()), settings)


def payload(micro: MicroBatch, site: str, layer: int) -> torch.Tensor:
    return micro.guidance[site, layer].payload


def test_a_resumed_response_is_guided_by_the_piece_that_generated_each_part(store: ShardStore) -> None:
    rolled = rolled_under_two_versions(store)
    first, second = rolled.parts
    seam = first.num_rows  # the token sampled last was not forwarded before the abort: it is the second piece's
    assert rolled.segments == [(0, seam), (seam, second.num_rows)]
    assert rolled.joined.versions == (0, 1)
    micro, counts, version = guided(store).micro_batch([rolled.row()], None)
    assert version == 1
    assert counts.guided == counts.replayed == counts.total == second.num_rows
    old, new = [store.get(t.guidance).sites for t in rolled.parts if t.guidance is not None]
    x = [sites["expert_input"].payload[1] for sites in (old, new)]
    assert torch.equal(payload(micro, "expert_input", 1)[:-1], torch.cat([x[0], x[1][seam:]]))
    assert not torch.equal(x[0], x[1][:seam])  # other weights: the second piece's record of these rows differs


@pytest.mark.parametrize(("version", "stale"), [(1, (True, False)), (2, (True, True))])
def test_a_piece_of_the_trainers_version_has_no_band_though_an_older_one_precedes(
    store: ShardStore, version: int, stale: tuple[bool, bool]
) -> None:
    rolled = rolled_under_two_versions(store)
    (_, seam), (_, end) = rolled.segments
    micro, _, _ = guided(store).micro_batch([rolled.row()], version)
    for guidance in micro.guidance.values():
        assert guidance.stale is not None
        assert guidance.stale.tolist() == [stale[0]] * seam + [stale[1]] * (end - seam) + [False]


def test_all_sites_and_layers_share_one_mask_of_stale_rows(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    make = SegmentBuilder._stale

    def counted(*args: Any) -> torch.Tensor:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(SegmentBuilder, "_stale", counted)
    rows = [rolled_under_two_versions(store).row()] * 2
    micro, _, _ = guided(store).micro_batch(rows, 1)
    assert len(made) == len(rows), "one mask a response, whatever its pieces, sites and layers"
    assert len(micro.guidance) == 6
    assert len({id(g.stale) for g in micro.guidance.values()}) == 1
    assert len({id(g.valid) for g in micro.guidance.values()}) == 1


@pytest.mark.parametrize(("given", "band"), [({}, 0.06), ({"band": 0.2}, 0.2), ({"band": "none"}, None)])
def test_the_forward_follows_older_pieces_within_the_band_that_is_set(
    store: ShardStore, given: dict[str, Any], band: float | None
) -> None:
    rolled = rolled_under_two_versions(store)
    seam, end = rolled.parts[0].num_rows, len(rolled.tokens) - 1
    forward = guided(store, **given)
    micro, _, _ = forward.micro_batch([rolled.row()], 1)
    differ = []
    for (site, layer), record in micro.guidance.items():
        assert (record.stale is None) == (band is None)
        x = torch.randn(record.header.shape, generator=torch.Generator().manual_seed(layer))
        with forward.context.armed(micro):
            y = forward.context.round_site(site, layer, x)[:end]
        fmt, own = get_format(record.header.format), forward.recipe.site_encode_scale(site)
        scale = torch.tensor(own) if isinstance(own, float) else own
        followed, near = (
            fmt.dequantize(decode(replace(record, stale=None if b is None else torch.ones_like(record.valid)), x,
                                  own_encode_scale=scale, band=b)[0])[:end]
            for b in (None, band)
        )  # fmt: skip
        assert torch.equal(y[seam:], followed[seam:]), "the piece of the trainer's version is followed everywhere"
        assert torch.equal(y[:seam], near[:seam])
        differ.append(bool((near[:seam] != followed[:seam]).any()))
    assert set(differ) == {band is not None}


def test_a_piece_that_read_rows_of_an_older_version_has_a_band_though_none_of_its_own_is(store: ShardStore) -> None:
    """The weights change while the second piece prefills what the first one wrote."""
    engine = make_engine("trace-all", store=store, max_tokens_per_step=4)
    first = generate(engine, "first", PROMPT, 12, abort_after=6)
    engine.add_request(Request("second", first.token_ids, SamplingParams(max_new_tokens=7, seed=3)))
    assert not engine.step()
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    while not (ended := engine.step()):
        pass
    rolled = Rolled(ended[0].token_ids, [first, *ended], engine, store)
    (_, seam), (_, end) = rolled.segments
    assert ended[0].row_versions.tolist() == [0] * 4 + [1] * (end - 4)
    assert seam > 4
    micro, _, _ = guided(store).micro_batch([rolled.row()], 1)
    for guidance in micro.guidance.values():
        assert guidance.stale is not None
        assert guidance.stale.tolist() == [True] * end + [False]


def test_key_and_value_come_from_the_piece_that_read_them_most(store: ShardStore) -> None:
    """Five tokens, then seven: the second piece read the first one's rows more often. Cut it to one, and it did not."""
    rolled = rolled_under_two_versions(store)
    old, new = [store.get(t.guidance).sites for t in rolled.parts if t.guidance is not None]
    seam = rolled.parts[0].num_rows
    for kept, first in ((7, new), (1, old)):
        rolled.tokens = rolled.tokens[: seam + 1 + kept]
        micro, counts, _ = guided(store).micro_batch([rolled.row()], 1)
        assert counts.guided == seam + kept
        for site in ("key", "value"):
            own = [sites[site].payload[1] for sites in (first, new)]
            assert torch.equal(payload(micro, site, 1)[:-1], torch.cat([own[0][:seam], own[1][seam : seam + kept]]))
    assert not torch.equal(old["key"].payload[1], new["key"].payload[1][:seam])


def test_the_readers_of_a_segment_decide_and_the_same_version_needs_no_other() -> None:
    def segments(*versions: int, last: int = 2) -> list[Segment]:
        """A prompt of 3, then 4, 2 and ``last`` tokens, with 2 of a tool before the last ones."""
        bounds = [(0, 6, 3), (6, 8, 7), (8, 10 + last, 11)]
        return [Segment(a, b, f, "s", (v,) * b, None) for (a, b, f), v in zip(bounds, versions, strict=True)]

    # The first 6 rows are read 18 times by the first piece and 2 times each by the other two; the next 2 rows 3 times
    # by the second piece and 2 times each by the third.
    assert key_value_sources(segments(0, 1, 2)) == [0, 2, 2]
    assert key_value_sources(segments(0, 1, 2, last=3)) == [2, 2, 2]
    assert key_value_sources(segments(0, 1, 1, last=3)) == [2, 1, 2]
    assert key_value_sources(segments(0, 0, 0, last=3)) == [0, 1, 2]
    assert key_value_sources([]) == []


def test_routing_comes_from_the_same_pieces(store: ShardStore) -> None:
    rolled = rolled_under_two_versions(store)
    first, second = rolled.parts
    assert first.routed_experts is not None
    assert second.routed_experts is not None
    seam = first.num_rows
    assert rolled.joined.routed.tolist() == [*first.routed_experts.tolist(), *second.routed_experts[seam:].tolist()]


def test_several_segments_read_like_one_record(store: ShardStore) -> None:
    """A response under one version, cut anywhere, gives the same micro-batch as the whole."""
    engine = make_engine("trace-all", store=store)
    t = generate(engine, "whole", PROMPT, 9)
    whole = Rolled(t.token_ids, [t], engine, store)
    (s,) = read_note(whole.joined.note, whole.hash)
    for cut in (1, 6, t.num_rows - 1):
        note = {"recipe": whole.hash, "segments": [s.clip(0, cut).pack(), s.clip(cut, t.num_rows).pack()]}
        forward = guided(store)
        micro, counts, _ = forward.micro_batch([whole.row()], 0)
        parts, again, _ = forward.micro_batch([whole.row(Joined(note, t.routed_experts, None))], 0)
        assert again.guided == counts.guided == t.num_rows
        for where, guidance in micro.guidance.items():
            other = parts.guidance[where]
            assert torch.equal(other.payload, guidance.payload)
            assert torch.equal(other.valid, guidance.valid)
            assert torch.equal(torch.as_tensor(other.encode_scale), torch.as_tensor(guidance.encode_scale))


def test_old_pieces_fall_back_and_new_ones_do_not(store: ShardStore) -> None:
    rolled = rolled_under_two_versions(store)
    first, second = rolled.parts
    _, counts, _ = guided(store).micro_batch([rolled.row()], 4)  # max_version_diff is 3
    assert counts.reasons["stale"] == first.num_rows
    assert counts.guided == counts.replayed == second.num_rows - first.num_rows


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_record_costs_its_own_rows(store: ShardStore, lost: int) -> None:
    rolled = rolled_under_two_versions(store)
    note = rolled.joined.note
    assert note is not None
    segments = read_note(note, rolled.hash)
    gone = GuidanceHandle("never written", segments[lost].stop, rolled.hash)
    segments[lost] = replace(segments[lost], handle=gone)
    row = rolled.row(Joined({**note, "segments": [s.pack() for s in segments]}, rolled.joined.routed, None))
    micro, counts, _ = guided(store).micro_batch([row], 1)
    rows = [s.stop - s.start for s in segments]
    assert counts.reasons["missing"] == rows[lost]
    assert counts.guided == sum(rows) - rows[lost]
    assert micro.guidance["key", 0].valid.tolist() == [lost != 0] * rows[0] + [lost != 1] * rows[1] + [False]


def test_a_tools_answer_is_guided_by_the_turn_that_read_it(store: ShardStore) -> None:
    rolled = rolled_in_two_turns(store)
    first, second = rolled.parts
    assert rolled.segments == [(0, first.num_rows), (first.num_rows, second.num_rows)]
    _, counts, _ = guided(store).micro_batch([rolled.row()], 0)
    assert counts.guided == counts.total == counts.replayed == second.num_rows


def test_an_answer_that_no_turn_read_falls_back(store: ShardStore) -> None:
    rolled = rolled_in_two_turns(store)
    longer = Rolled((*rolled.tokens, 20, 21), rolled.parts, make_engine("trace-all"), store)
    assert longer.segments == rolled.segments
    _, counts, _ = guided(store).micro_batch([longer.row()], 0)
    assert counts.reasons["missing"] == 2
    assert counts.guided == counts.replayed == counts.total - 2


def test_a_rewritten_history_keeps_what_is_still_its_own(store: ShardStore) -> None:
    """An agent loop strips part of its first turn before the second; its output is what the second turn saw."""
    engine = make_engine("trace-all", store=store)
    first = generate(engine, "first", PROMPT, 6)
    kept = (*first.token_ids[: len(PROMPT) + 2], 30)
    second = generate(engine, "second", kept, 6)
    rolled = Rolled(second.token_ids, [first, second], engine, store)
    seam = len(PROMPT) + 2 if first.token_ids[len(PROMPT) + 2] != 30 else len(PROMPT) + 3
    assert rolled.segments == [(0, seam), (seam, second.num_rows)]
    _, counts, _ = guided(store).micro_batch([rolled.row()], 0)
    assert counts.guided == second.num_rows


def test_pieces_of_another_output_own_nothing(store: ShardStore) -> None:
    engine = make_engine("trace-all", store=store)
    other = generate(engine, "other", (9, 9, 9), 6)
    own = generate(engine, "own", PROMPT, 6)
    assert Rolled(own.token_ids, [other, own], engine, store).segments == [(0, own.num_rows)]


def test_branches_of_one_prompt_do_not_own_each_others_rows(store: ShardStore) -> None:
    engine = make_engine("trace-all", store=store)
    a = generate(engine, "a", PROMPT, 6)
    engine.update_weights(tiny_weights(tiny_config(), seed=1).items(), 1)
    b = generate(engine, "b", PROMPT, 6)
    assert a.response_ids[0] != b.response_ids[0]
    assert Rolled(b.token_ids, [a, b], engine, store).segments == [(0, b.num_rows)]
    assert Rolled(a.token_ids, [a, b], engine, store).segments == [(0, a.num_rows)]


def test_a_session_holds_the_routing_of_each_row_once(store: ShardStore) -> None:
    rolled = rolled_in_two_turns(store)
    first, second = (piece(t, rolled.hash) for t in rolled.parts)
    held = [first.after([]), second.after([first])]
    seam = rolled.parts[0].num_rows
    assert [len(p.routed) for p in held] == [seam, rolled.parts[1].num_rows - seam]
    assert join_pieces(rolled.tokens, held).routed.tolist() == rolled.joined.routed.tolist()
    rewritten = replace(first, tokens=(*first.tokens[:-1], 31))
    assert second.after([rewritten]) is second


def test_a_piece_without_a_token_owns_nothing(store: ShardStore) -> None:
    engine = make_engine("trace-all", store=store)
    engine.add_request(Request("turned away", PROMPT, SamplingParams(max_new_tokens=6)))
    empty = engine.abort("turned away")
    assert not empty.response_ids
    own = generate(engine, "own", PROMPT, 6)
    assert Rolled(own.token_ids, [empty, own], engine, store).segments == [(0, own.num_rows)]
    assert join_pieces(PROMPT, [piece(empty, engine.recipe.hash)]) == Joined(None, None, None)


def test_rows_that_an_abort_left_out_are_the_next_pieces(store: ShardStore) -> None:
    engine = make_engine("trace-all", store=store)
    first = generate(engine, "first", PROMPT, 12, abort_after=5)
    first.row_versions[-2:] = -1  # as after a preemption: its record lacks them
    first.routed_experts = None
    second = generate(engine, "second", first.token_ids, 7)
    rolled = Rolled(second.token_ids, [first, second], engine, store)
    seam = first.num_rows - 2
    assert rolled.segments == [(0, seam), (seam, second.num_rows)]
    assert (rolled.joined.routed[:seam] == -1).all()
    assert (rolled.joined.routed[seam:] >= 0).all()


def test_pieces_of_two_recipes_are_an_error() -> None:
    def with_recipe(recipe: str) -> Piece:
        whole = Segment(0, 2, 2, "s", (0, 0), None)
        return Piece((1, 2, 3), 1, {"recipe": recipe, "segments": [whole.pack()]})

    with pytest.raises(GuidanceError, match="under two recipes, aaaa and bbbb"):
        join_pieces((1, 2, 3), [with_recipe("aaaa"), with_recipe("bbbb")])


def test_a_segment_survives_its_packing() -> None:
    s = Segment(2, 6, 4, "0/ab", (1, 1, 1, 1, 1, 2), GuidanceHandle("0/ab", 9, "feed", 321))
    assert s.pack() == [2, 6, 4, "0/ab", [[1, 5], [2, 1]], ["0/ab", 9, "feed", 321]]
    assert Segment.unpack(s.pack()) == s
