"""Removes the handling of one event after another and checks that the tests named for it fail.

python benchmarks/mutations.py [--only WORD]

Each mutation is applied to a copy of src; exit code 1 where one survives, where its text is no longer in the file exactly
once, or where pytest ends otherwise than by a failed test (so that a broken mutation does not count as killed).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    event: str
    file: str
    old: str
    new: str
    tests: str  # ids below tests/, separated by spaces


ENGINE, SLICES, SCHEDULER = "rollout/engine.py", "train/slices.py", "rollout/scheduler.py"
SEQUENCE, STORE, SHARDS, CONTEXT = "rollout/sequence.py", "guidance/store.py", "guidance/shards.py", "nn/context.py"
_ENGINE, _SLICES = "rollout/test_engine.py::test_", "train/test_slices.py::test_"
_OWN, _TURNS, _CONTEXT = (
    "rollout/test_invariants.py::test_",
    "rollout/test_multi_turn.py::test_",
    "nn/test_context.py::test_",
)
_PREEMPTED = f"{_ENGINE}preemption_changes_no_token_and_marks_its_rows"
_RECOMPUTED = f"{_OWN}rows_preempted_and_recomputed_under_new_weights_are_invalid_and_carry_the_new_version"
_CHUNKS = f"{_OWN}weights_that_change_between_chunks_of_a_prompt_split_its_rows"
_NEXT_TURN = f"{_OWN}weights_that_change_between_turns_leave_the_old_turns_rows_old"
_OTHER = f"{_OWN}a_record_of_other_rows_or_tokens_guides_none_of_them"

# fmt: off
MUTATIONS = [
    Mutation("last token: one row fewer gathered", ENGINE, "        rows = seq.num_computed\n        if seq.finish_reason != \"abort\" and rows", "        rows = seq.num_computed - 1\n        if seq.finish_reason != \"abort\" and rows + 1", f"{_ENGINE}rows_are_tokens_minus_one_whatever_ends_a_response"),
    Mutation("prefix: pages shared between sequences", "rollout/block_manager.py", "self._free.popleft()", "self._free[len(seq.block_table)]", f"{_OWN}identical_prompts_have_rows_of_their_own"),
    Mutation("chunked prefill: chunk starts one row early", SCHEDULER, "batch.append(Scheduled(seq, seq.num_computed, stop))\n            budget -=", "batch.append(Scheduled(seq, max(0, seq.num_computed - 1), stop))\n            budget -=", f"{_ENGINE}sizes_do_not_change_a_record {_CHUNKS}"),
    Mutation("preemption: recomputed rows not marked", SCHEDULER, "        seq.num_recomputed = max(seq.num_recomputed, seq.num_computed)\n", "", f"{_PREEMPTED} {_RECOMPUTED}"),
    Mutation("preemption: a later one shortens the mark", SCHEDULER, "max(seq.num_recomputed, seq.num_computed)", "seq.num_computed", f"{_OWN}a_second_preemption_does_not_shorten_the_mark"),
    Mutation("preemption: valid bits all set", ENGINE, "torch.arange(len(slots)) >= seq.num_recomputed", "torch.arange(len(slots)) >= 0", _RECOMPUTED),
    Mutation("preemption: routed experts kept", ENGINE, "experts[: seq.num_recomputed] = -1", "experts[:0] = -1", _RECOMPUTED),
    Mutation("preemption: row versions of the first pass", SCHEDULER, "        seq.row_versions.clear()\n", "", _RECOMPUTED),
    Mutation("preemption: -1 experts replayed", SLICES, "(t.routed_experts[:, 0, 0] >= 0) & ", "", f"{_SLICES}rows_recomputed_or_too_old_are_not_replayed"),
    Mutation("abort: pages released before the record", ENGINE, "        seq.finish_reason = \"abort\"\n", "        seq.finish_reason = \"abort\"\n        self.blocks.release(seq)\n        seq.num_computed = 0\n        seq.row_versions.clear()\n", f"{_ENGINE}abort_of_a_running_request"),
    Mutation("abort: missing rows not marked", ENGINE, "F.pad(row_versions, (0, missing), value=-1)", "F.pad(row_versions, (0, missing), value=0)", f"{_ENGINE}abort_before_all_rows_are_there"),
    Mutation("multi-turn: an answer counts as sampled", SEQUENCE, "[False] * len(reply)", "[True] * len(reply)", f"{_TURNS}answers_teach_nothing {_NEXT_TURN}"),
    Mutation("multi-turn: an answer has a version", SEQUENCE, "self.versions.extend([-1]", "self.versions.extend([0]", _NEXT_TURN),
    Mutation("multi-turn: collate ignores the sampled mask", "types.py", "response_mask[b, p - 1 : n - 1] = t.sampled_mask", "response_mask[b, p - 1 : n - 1] = True", f"{_TURNS}answers_teach_nothing"),
    Mutation("weights: one version for all rows", ENGINE, "torch.tensor(seq.row_versions, dtype=torch.int32)", "torch.full((len(seq.row_versions),), self._version, dtype=torch.int32)", f"{_CHUNKS} {_NEXT_TURN}"),
    Mutation("weights: old rows guide", SLICES, "return same_token & fresh & record.valid", "return same_token & record.valid", f"{_CHUNKS} {_NEXT_TURN}"),
    Mutation("weights: stale one version late", SLICES, "version - record.versions <= max", "version - record.versions - 1 <= max", f"{_SLICES}staleness_begins_beyond_the_allowed_difference"),
    Mutation("weights: old experts replayed", SLICES, " & (t.row_versions >= oldest_version)", "", f"{_SLICES}rows_recomputed_or_too_old_are_not_replayed"),
    Mutation("packing: token ids not compared", SLICES, "same_token = record.token_ids == tokens", "same_token = torch.ones_like(record.valid)", _OTHER),
    Mutation("packing: invalid rows guide", SLICES, "return same_token & fresh & record.valid", "return same_token & fresh", f"{_RECOMPUTED} {_SLICES}single_rows_fall_back_by_their_first_reason"),
    Mutation("packing: rows one position late", SLICES, "payload[:, b, : record.rows] = data.payload", "payload[:, b, 1 : record.rows + 1] = data.payload", f"{_SLICES}every_row_is_the_record_of_its_token"),
    Mutation("recompute: any key passes", CONTEXT, "        if key != armed:", "        if False:", f"{_CONTEXT}a_forward_must_carry_the_armed_key"),
    Mutation("reference forward: stays armed", CONTEXT, "            self._current, self.observer = None, None", "            self.observer = None", f"{_CONTEXT}disarmed_and_recordless_forwards_round_to_nearest"),
    Mutation("recipe: another one accepted", SLICES, "record.recipe_hash != recipe.hash", "False", f"{_SLICES}another_recipe_is_refused_by_name"),
    Mutation("lost write: rows not counted", SLICES, "\"missing\"] += rows\n        return None\n    if", "\"missing\"] += 0\n        return None\n    if", f"{_OWN}the_record_of_a_killed_rollout_is_missing_with_all_of_its_rows"),
    Mutation("late write: readers do not wait", "guidance/disk.py", "left <= 0 or", "True or", "guidance/test_disk_store.py::test_a_reader_waits_for_a_late_record_and_only_once_in_vain"),
    Mutation("short record: row count not compared", SLICES, "    if record.rows != rows:", "    if False:", _OTHER),
    Mutation("damage: memory checksum not compared", STORE, "record.checksum() != crc", "False", f"{_SLICES}any_changed_byte_of_a_record_is_noticed"),
    Mutation("damage: chunk checksum not compared", SHARDS, "if checksum(memory[k * step : (k + 1) * step]) != sums[at + k]:", "if False:", "guidance/test_disk_store.py::test_damage_is_named_and_a_damaged_header_is_not_called_missing"),
]
# fmt: on


def outcome(m: Mutation) -> str:
    """ "killed", or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        src = Path(folder, "src")
        shutil.copytree(ROOT / "src", src, ignore=shutil.ignore_patterns("__pycache__"))
        target = src / "tracefp4" / m.file
        text = target.read_text()
        if (found := text.count(m.old)) != 1:
            return f"SURVIVED: its text is in {m.file} {found} times"
        target.write_text(text.replace(m.old, m.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{t}" for t in m.tests.split())],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(src)}, capture_output=True, text=True,
        )  # fmt: skip
    if run.returncode == 1:
        return "killed"
    return "SURVIVED" if run.returncode == 0 else f"SURVIVED: pytest exit code {run.returncode}\n{run.stdout[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutations whose event contains this")
    chosen = [m for m in MUTATIONS if parser.parse_args().only in m.event]
    survived = 0
    for m in chosen:
        result = outcome(m)
        survived += result != "killed"
        print(f"{m.event:<48} {result}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} killed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
