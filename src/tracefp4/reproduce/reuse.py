"""A run whose twin is complete is not trained again: tables and commands share the runs that they have in common.

Twins have equal config.json files, up to the folder that holds their warm start; the warm start's name tells how it was
made. They are looked for in the folder of the command and in those beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tracefp4.files import replaced_dir
from tracefp4.report import ensure_dir, write_json_atomic
from tracefp4.report.logger import CONFIG, is_complete
from tracefp4.reproduce.plan import SCORES, Spec, canonical
from tracefp4.saves import CHECKPOINT, STATES


def adopt(spec: Spec) -> Path | None:
    """Copies a complete twin's run, and its scores where they are what this one needs. Returns the twin's folder.

    States stay behind: nobody goes on from a run that is complete. Raises StorageError where the disk refuses.
    """
    if not spec.trains or spec.run_dir.exists():
        return None
    twin = next((folder for folder in _complete_runs(spec) if _is_twin(folder, spec)), None)
    if twin is None:
        return None
    ensure_dir(spec.folder)
    with replaced_dir(spec.run_dir) as staging:
        shutil.copytree(twin, staging, dirs_exist_ok=True, ignore=shutil.ignore_patterns(STATES, ".*"))
    scores = _scores(twin.with_name(f"eval-{twin.name}") / SCORES, spec)
    if scores is not None:
        ensure_dir(spec.eval_dir)
        write_json_atomic(spec.eval_dir / SCORES, scores)
    write_json_atomic(spec.origin, {"run": f"{twin.parents[2].name}/{twin.relative_to(twin.parents[2])}"})
    return twin


def _complete_runs(spec: Spec) -> Iterator[Path]:
    """Run folders of this and of other commands: <command>/<table>/<arm>/seed<k>."""
    for folder in sorted(spec.out.parent.glob(f"*/*/*/seed{spec.seed}")):
        if is_complete(folder, spec.steps) and (folder / CHECKPOINT).is_dir():
            yield folder


def _is_twin(folder: Path, spec: Spec) -> bool:
    try:
        return canonical(json.loads((folder / CONFIG).read_bytes())) == spec.config
    except (OSError, ValueError, KeyError, TypeError):
        return False  # damaged, or of another version: it is trained here


def _scores(path: Path, spec: Spec) -> dict[str, Any] | None:
    """Of a twin, with the forms that this run is evaluated in, problems and samples as many."""
    if spec.evaluation is None:
        return None
    try:
        scores: dict[str, Any] = json.loads(path.read_bytes())
        forms = {form: scores["forms"][form] for form in spec.forms}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    problems, samples = spec.evaluation
    whole = all(len(rewards) == problems and all(len(row) == samples for row in rewards) for rewards in forms.values())
    return {**scores, "forms": forms} if whole else None
