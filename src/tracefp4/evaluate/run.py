"""Answering held-out problems in every form. The forms draw with the same seeds, sample by sample, so that the
difference of two is paired by problem."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tracefp4.align.passrate import Rewards
from tracefp4.config import ConfigError, config_hash, resolved
from tracefp4.errors import TracefpError
from tracefp4.evaluate.figures import difference_figures, form_figures
from tracefp4.evaluate.folder import EVAL, EvalFolder, Line
from tracefp4.evaluate.target import FP4, Form, make_forms
from tracefp4.files import folder_lock
from tracefp4.guidance.store import MemoryStore
from tracefp4.loop import RunConfig, preflight
from tracefp4.loop.posttraining import quantize_calibrated
from tracefp4.nn.loading import load_policy
from tracefp4.report import ensure_dir, progress, write_json_atomic
from tracefp4.report.progress import Bar
from tracefp4.report.provenance import checkpoint_fingerprint
from tracefp4.rollout.engine import RolloutEngine
from tracefp4.tasks import Prompt, Task

TAG = "eval"
DEFAULT_PROBLEMS = 256
_TRAINING_ONLY = frozenset({"prompts_per_step", "samples_per_prompt"})


@dataclass(frozen=True)
class EvalRequest:
    """What is asked of an evaluation.

    problems: held-out ones, the first of the task's; None takes run.eval_prompts, or 256 where that is 0. samples: of
    each problem. ks: k of pass@k, each up to samples; empty for 1 and samples. forms: "bf16" (the unquantized recipe in
    rollout.dtype), "fp4" (as the recipe's [quant] says) or names of methods; differences are taken to the first.
    """

    problems: int | None = None
    samples: int = 4
    ks: tuple[int, ...] = ()
    forms: tuple[str, ...] = ("bf16", FP4)


def evaluate(
    config: RunConfig,
    out_dir: str | Path,
    request: EvalRequest | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    task: Task | None = None,
) -> dict[str, Any]:
    """Answers held-out problems in every form, writes ``out_dir`` and returns the content of its eval.json.

    resume: go on with an interrupted evaluation, or add forms to one; overwrite: replace it. task: one of your own.
    Raises TracefpError for what the user can mend; what can be known before the folder is touched is checked then.
    """
    evaluation = Evaluation(config, request or EvalRequest(), task)
    try:
        with folder_lock(ensure_dir(out_dir)):
            return evaluation.run(Path(out_dir), resume=resume, overwrite=overwrite)
    finally:
        evaluation.close()


class Evaluation:
    """Problems, their token ids and the forms; the constructor makes all checks that need no weights."""

    def __init__(self, config: RunConfig, request: EvalRequest, task: Task | None = None) -> None:
        count = request.problems if request.problems is not None else config.run.eval_prompts or DEFAULT_PROBLEMS
        self.samples, self.ks = request.samples, request.ks or tuple(sorted({1, request.samples}))
        _check_request(count, self.samples, self.ks, request.forms)
        self.config = config
        self.parts = preflight(_without_method(config), task, training=False)
        try:
            self.forms = make_forms(request.forms, config, self.parts.hf_config.num_hidden_layers)
            self.prompts = _held_out(self.parts.task, count)
            kept, encoded = self.parts.encode(self.prompts)
            longest = self.parts.requests(kept, 1, TAG, encoded=[max(encoded, key=len)] * len(kept))[0]
            for form in self.forms:
                self._engine(form, device="meta").add_request(longest)  # its limits show; nothing is allocated
        except BaseException:
            self.close()
            raise
        self.ids = {p.id: ids for p, ids in zip(kept, encoded, strict=True)}
        self.chunk = max(1, -(-config.rollout.max_num_seqs // self.samples))  # fills the engine once

    def run(self, out_dir: Path, *, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
        """Answers what ``out_dir``, which the caller has locked, does not hold yet, and writes the figures."""
        folder = EvalFolder(out_dir, [self._line(p) for p in self.prompts], self.samples, self.chunk)
        facts = folder.open(*self._facts(), resume, overwrite)
        if self.config.run.threads:
            torch.set_num_threads(self.config.run.threads)
        for form in self.forms:
            done = folder.begin(form.name)
            if done < len(self.prompts):
                self._answer(form, done, folder)
        facts |= self._figures(folder) | {"complete": True}
        write_json_atomic(out_dir / EVAL, facts)
        return facts

    def close(self) -> None:
        """Ends what the task keeps running."""
        self.parts.close()

    def _answer(self, form: Form, done: int, folder: EvalFolder) -> None:
        """The chunks from problem ``done`` on."""
        engine = self._engine(form)
        try:
            policy = load_policy(self.parts.path, form.dtype)
            engine.update_weights(policy.named_parameters(), 0)
            if form.calibrated:
                quantize_calibrated(engine, self.parts, policy)
        except TracefpError as error:
            raise TracefpError(f"checkpoint {self.parts.path} cannot be evaluated as {form.name}: {error}") from error
        left = self.samples * sum(p.id in self.ids for p in self.prompts[done:])
        with progress(left, f"{TAG} {form.name}", every=max(1, -(-left // 10)), unit="response") as bar:
            for start in range(done, len(self.prompts), self.chunk):
                lines, seconds = self._chunk(engine, self.prompts[start : start + self.chunk], bar)
                folder.append(form.name, start, lines, seconds)

    def _chunk(self, engine: RolloutEngine, prompts: Sequence[Prompt], bar: Bar) -> tuple[list[Line], float]:
        """(a line of the responses file for each problem, seconds of generation)."""
        asked = [p for p in prompts if p.id in self.ids]
        each = [p for p in asked for _ in range(self.samples)]
        requests = self.parts.requests(asked, self.samples, TAG, encoded=[self.ids[p.id] for p in asked])
        exchanges = self.parts.exchanges({r.request_id: p for r, p in zip(requests, each, strict=True)})

        def show(finished: int) -> None:
            for _ in range(finished):
                bar.step()

        started = time.perf_counter()
        trajectories = engine.generate(requests, on_turn=exchanges, progress=show)
        seconds = time.perf_counter() - started
        rewards = self.parts.score(each, trajectories, exchanges)
        lines = {p.id: self._line(p) for p in prompts}
        for p, t, reward in zip(each, trajectories, rewards, strict=True):
            sample = {"text": self.parts.text(t), "reward": reward, "tokens": t.num_sampled}
            lines[p.id]["samples"].append(sample | {"finish_reason": t.finish_reason})
        return list(lines.values()), seconds

    def _line(self, prompt: Prompt) -> Line:
        """The line of a problem without its samples; overlong: its prompt does not fit, so that it is not asked."""
        chat = self.parts.encoder.chat and prompt.messages
        text: Any = [dict(m) for m in prompt.messages or ()] if chat else prompt.text
        return {"id": prompt.id, "prompt": text, "overlong": prompt.id not in self.ids, "samples": []}

    def _engine(self, form: Form, device: str | None = None) -> RolloutEngine:
        rollout = self.parts.rollout.model_copy(update={"dtype": form.dtype})
        return RolloutEngine(self.parts.hf_config, form.recipe, rollout, MemoryStore(), device or self.parts.device)

    def _facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(all that the responses depend on, what else eval.json says of this evaluation)."""
        config = resolved(self.config)
        sections = {name: config[name] for name in ("task", "quant", "rollout")}
        sections["sampling"] = {k: v for k, v in config["sampling"].items() if k not in _TRAINING_ONLY}
        settings = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
        settings |= {"run.seed": self.config.run.seed, "--problems": len(self.prompts), "--samples": self.samples}
        checkpoint = {"path": self.config.model.path, **checkpoint_fingerprint(self.parts.path)}
        description = getattr(self.parts.task, "description", self.config.task.name)
        asked = {"settings": settings, "checkpoint": checkpoint, "forms_asked": [form.name for form in self.forms]}
        return asked, {"config_hash": config_hash(self.config), "task": description, "k": list(self.ks)}

    # -- figures ------------------------------------------------------------------------------------------------

    def _figures(self, folder: EvalFolder) -> dict[str, Any]:
        lines = {form.name: folder.read(form.name) for form in self.forms}
        rewards = {name: self._rewards(of_form) for name, of_form in lines.items()}
        speed = folder.tokens_per_second()
        first, *others = self.forms
        return {
            "forms": {
                form.name: form_figures(lines[form.name], rewards[form.name], self.ks)
                | {"tokens_per_second": speed.get(form.name), "dtype": form.dtype, "recipe_hash": form.recipe.hash}
                for form in self.forms
            },
            "differences": {
                form.name: {"minus": first.name} | difference_figures(rewards[form.name], rewards[first.name], self.ks)
                for form in others
            },
        }

    def _rewards(self, lines: Sequence[Line]) -> Rewards:
        """f64 [P, n]; a problem whose prompt does not fit cannot be answered and counts as failed."""
        failed = [0.0] * self.samples
        return np.array([[s["reward"] for s in line["samples"]] or failed for line in lines], dtype=np.float64)


def _check_request(problems: int, samples: int, ks: Sequence[int], forms: Sequence[str]) -> None:
    for name, value in (("--problems", problems), ("--samples", samples), ("--k", min(ks))):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if (k := max(ks)) > samples:
        raise ConfigError(
            f"--k {k} needs at least {k} samples a problem and --samples is {samples}: raise it, or leave {k} out"
        )
    if len(set(ks)) < len(ks):
        raise ConfigError(f"--k names {next(k for k in ks if list(ks).count(k) > 1)} twice")
    if not forms:
        raise ConfigError("--forms names nothing to evaluate")


def _without_method(config: RunConfig) -> RunConfig:
    """The compute dtype is then the recipe's own: forms have their methods."""
    return config.model_copy(update={"method": config.method.model_copy(update={"name": "bf16"})})


def _held_out(task: Task, count: int) -> list[Prompt]:
    try:
        prompts = task.test_prompts(count)
    except TracefpError as error:
        raise TracefpError(f"--problems {count} cannot be met: {error}") from error
    if len(prompts) != count:
        raise TracefpError(f"--problems {count} cannot be met: the task gives {len(prompts)} held-out problems")
    return prompts
