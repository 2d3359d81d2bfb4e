"""What travels between verl's rollout and trainer; runs without verl."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import make_engine, tiny_config, tiny_model, tiny_requests, tiny_weights
from tracefp4.adapters.verl.figures import rename_figures, segment_metrics
from tracefp4.adapters.verl.guided import GuidedForward, Row
from tracefp4.adapters.verl.rows import LossWatch, make_note, read_trajectory, replay_field, stack_experts
from tracefp4.adapters.verl.settings import read_settings
from tracefp4.errors import TracefpError
from tracefp4.guidance import GuidanceError
from tracefp4.guidance.disk import ShardStore
from tracefp4.types import Trajectory


def rolled_out(url: Path, method: str = "trace-all", n: int = 3) -> tuple[list[Trajectory], str]:
    store = ShardStore(str(url))
    engine = make_engine(method, store=store)
    done = engine.generate(tiny_requests(n, max_new_tokens=8))
    assert store.close()
    return done, engine.recipe.hash


def guided(url: Path, method: str = "trace-all") -> GuidedForward:
    settings = read_settings({"model_config": {}, "tracefp4": {"method": method, "guidance": {"url": str(url)}}})
    assert settings is not None
    return GuidedForward(tiny_model(tiny_config()), settings)


def row(t: Trajectory, recipe_hash: str, eligible: bool = True) -> Row:
    tokens = torch.tensor(t.token_ids)
    routed = None if t.routed_experts is None else torch.cat([t.routed_experts, t.routed_experts[:1] * 0])
    return Row(tokens, len(t.prompt_ids), make_note(t, recipe_hash), routed, eligible)


def test_a_note_and_verls_fields_restore_the_trajectory(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    r = row(t, recipe_hash)
    back = read_trajectory(r.tokens, r.prompt_tokens, r.note, r.routed, recipe_hash)
    assert (back.prompt_ids, back.response_ids) == (t.prompt_ids, t.response_ids)
    assert [(s.start, s.stop, s.handle) for s in back.segments] == [(0, t.num_rows, t.guidance)]
    assert back.row_versions.tolist() == t.row_versions.tolist()
    assert back.routed_experts is not None
    assert t.routed_experts is not None
    assert torch.equal(back.routed_experts, t.routed_experts)


def test_every_row_of_a_shuffled_micro_batch_finds_its_own_record(tmp_path: Path) -> None:
    done, recipe_hash = rolled_out(tmp_path, n=4)
    forward = guided(tmp_path)
    micro, counts, version = forward.micro_batch([row(t, recipe_hash) for t in reversed(done)], None)
    assert version == 0
    assert counts.guided == counts.total == sum(t.num_rows for t in done)
    assert counts.replayed == counts.total
    T = max(len(t.token_ids) for t in done)
    valid = micro.guidance["key", 1].valid.view(4, T)
    assert valid.sum(1).tolist() == [t.num_rows for t in reversed(done)]


def test_rows_whose_tokens_changed_fall_back_and_are_counted(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    r = row(t, recipe_hash)
    r.tokens[2] += 1
    _, counts, _ = guided(tmp_path).micro_batch([r], 0)
    assert counts.reasons["token"] == 1
    assert counts.guided == t.num_rows - 1


def test_rows_behind_the_record_fall_back_and_so_does_their_routing(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    r = row(t, recipe_hash)
    assert r.routed is not None
    zeros = torch.zeros(2, *r.routed.shape[1:], dtype=torch.int16)  # verl's filling; expert 0 was not chosen
    longer = Row(torch.cat([r.tokens, torch.tensor([3, 4])]), r.prompt_tokens, r.note, torch.cat([r.routed, zeros]))
    _, counts, _ = guided(tmp_path).micro_batch([longer], 0)
    assert counts.reasons["missing"] == 2
    assert counts.guided == counts.replayed == t.num_rows


def test_a_sequence_that_was_cut_short_keeps_its_guidance(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    r = row(t, recipe_hash)
    shorter = Row(r.tokens[:-3], r.prompt_tokens, r.note, r.routed)
    _, counts, _ = guided(tmp_path).micro_batch([shorter], 0)
    assert counts.guided == counts.total == counts.replayed == t.num_rows - 3


def test_old_records_fall_back_to_nearest_rounding(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    _, counts, _ = guided(tmp_path).micro_batch([row(t, recipe_hash)], 4)
    assert counts.reasons["stale"] == t.num_rows
    assert counts.replayed == 0


def test_a_dropped_note_is_counted_as_missing_and_padding_is_not_counted(tmp_path: Path) -> None:
    (a, b, c), recipe_hash = rolled_out(tmp_path)
    dropped = Row(torch.tensor(a.token_ids), len(a.prompt_ids), None)
    rows = [dropped, row(b, recipe_hash), row(c, recipe_hash, eligible=False)]
    _, counts, _ = guided(tmp_path).micro_batch(rows, 0)
    assert counts.total == a.num_rows + b.num_rows
    assert counts.guided == b.num_rows
    assert counts.reasons["missing"] == a.num_rows


def test_another_recipe_is_an_error(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path, "trace")
    with pytest.raises(GuidanceError, match="was rolled out under recipe"):
        guided(tmp_path).micro_batch([row(t, recipe_hash)], 0)


def test_a_lost_hook_and_an_unused_forward_are_found(tmp_path: Path) -> None:
    model = tiny_model(tiny_config())
    settings = read_settings({"model_config": {}, "tracefp4": {"method": "qat"}})
    assert settings is not None
    forward = GuidedForward(model, settings)
    forward.check_applied(model)
    with pytest.raises(TracefpError, match="never reached site expert_input of layer 0"), forward.proving():
        pass
    with forward.proving():
        model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False)
    model.get_decoder().layers[1].mlp.gate._forward_hooks.clear()
    with pytest.raises(TracefpError, match="layer 1: the router lost its replay hook"):
        forward.check_applied(model)


def test_split_experts_are_stacked_again() -> None:
    weights = tiny_weights(tiny_config())
    split = []
    for name, w in weights.items():
        base = name.rpartition(".")[0]
        if name.endswith("gate_up_proj"):
            for e, one in enumerate(w):
                gate, up = one.chunk(2)
                split += [(f"{base}.{e}.up_proj.weight", up), (f"{base}.{e}.gate_proj.weight", gate)]
        elif name.endswith("experts.down_proj"):
            split += [(f"{base}.{e}.down_proj.weight", one) for e, one in enumerate(w)]
        else:
            split.append((name, w))
    back = dict(stack_experts(split))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    lost = [(n, w) for n, w in split if ".experts.3.up" not in n]
    with pytest.raises(TracefpError, match=r"experts\.3\.up_proj\.weight is missing"):
        dict(stack_experts(lost))


def test_rows_without_routing_are_marked_so() -> None:
    t = Trajectory("r", (1, 2), (3, 4), torch.zeros(2), torch.zeros(2), torch.zeros(3), None, "stop")
    assert replay_field(t, 2, 2).tolist() == [[[-1, -1]] * 2] * 3


def test_lost_guidance_is_an_error_after_the_configured_steps() -> None:
    watch = LossWatch(below=0.5, limit=2)
    watch.note(0, 100, 0, {"missing": 100})
    watch.note(1, 100, 60, {})  # enough: the count starts anew
    watch.note(2, 100, 10, {"missing": 90})
    watch.note(2, 100, 100, {"missing": 90})  # the same step's later passes count with it
    watch.note(3, 100, 0, {"missing": 100})
    with pytest.raises(GuidanceError, match=r"0 of 100 rows .* version 4, .* in 2 steps in a row \(rows by reason: m"):
        watch.note(4, 100, 0, {"missing": 100, "stale": 0})


def test_no_limit_never_raises() -> None:
    watch = LossWatch(below=0.5, limit=0)
    for step in range(5):
        watch.note(step, 10, 0, {})


def test_figures_get_their_own_names_and_shares() -> None:
    metrics = {"actor/guidance/rows": 8.0, "actor/guidance/guided_rows": 6.0, "actor/router/rows": 0.0, "actor/lr": 1.0}
    rename_figures(metrics)
    assert metrics == {
        "guidance/rows": 8.0, "guidance/guided_rows": 6.0, "guidance/guided_share": 0.75, "router/rows": 0.0,
        "actor/lr": 1.0,
    }  # fmt: skip


def test_segments_and_their_age_are_logged(tmp_path: Path) -> None:
    (t, *_), recipe_hash = rolled_out(tmp_path)
    note = make_note(t, recipe_hash)
    start, stop, first, sample, _, handle = note["segments"][0]
    parts = [[start, 4, first, sample, [[1, 4]], handle], [4, stop, first, sample, [[1, 4], [3, stop - 4]], handle]]
    metrics = segment_metrics([note, {**note, "segments": parts}], 3)
    assert metrics["guidance/segments_mean"] == 1.5
    assert metrics["guidance/segments_max"] == 2
    assert metrics["guidance/version_lag_max"] == 3
    assert metrics["guidance/version_lag_mean"] == (3 * stop + 2 * 4) / (2 * stop)
