"""What a live meter is asked, and the run it takes its settings from."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tracefp4.config import ConfigError, load_config
from tracefp4.errors import TracefpError
from tracefp4.loop.config import RunConfig
from tracefp4.report.logger import CONFIG
from tracefp4.saves import CHECKPOINT
from tracefp4.tasks import Prompt
from tracefp4.tasks.rows import Row, read_rows

if TYPE_CHECKING:
    from tracefp4.loop.parts import Parts

PROMPT_KEYS = ("prompt", "messages", "question", "problem", "text", "input")


@dataclass(frozen=True)
class LiveRequest:
    """config: recipe of the method, its model.path the trainer's weights. rollout: the engine's weights where they are
    others. prompts: a file, None for held-out problems of the recipe's task. band: largest distance that passes, in
    multiples of the BF16 floor. train_logprobs, rollout_logprobs: "processed" (divided by the temperature) or "raw"."""

    config: RunConfig
    rollout: str | None = None
    prompts: Path | None = None
    count: int = 16
    samples: int = 2
    band: float = 1.2
    layers: bool = True
    train_logprobs: str = "processed"
    rollout_logprobs: str = "processed"

    def __post_init__(self) -> None:
        for name, value in (("--count", self.count), ("--samples", self.samples)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not self.band >= 1:
            raise ConfigError(f"--band must be at least 1, got {self.band:g}")
        for name, text in (
            ("--train-logprobs", self.train_logprobs),
            ("--rollout-logprobs", self.rollout_logprobs),
        ):
            if text not in ("processed", "raw"):
                raise ConfigError(f"{name} must be processed or raw, got {text!r}")


def load_run(target: str | None, overrides: list[str], train: str | None, method: str | None) -> RunConfig:
    """Settings of a run folder or recipe, or the defaults where there is none.

    train: other weights than the run's checkpoint/ or the recipe's model.path. Raises TracefpError for what is not
    there.
    """
    settings = list(overrides)
    if method is not None:
        settings.append(f"method.name={method}")
    if target is None:
        if train is None:
            raise ConfigError("nothing to measure: give a run folder or recipe, or --train DIR")
        return _with_settings(settings, train)
    folder = Path(target)
    if not folder.exists():
        raise ConfigError(f"there is neither a run folder nor a recipe at {target}")
    source = folder
    if folder.is_dir():
        source = folder / CONFIG
        if not source.is_file():
            raise TracefpError(f"{folder} is no run folder (it has no {CONFIG}): give one, or a recipe")
        if _is_checkpoint(source):
            raise TracefpError(f"{folder} is a checkpoint, not a run: use --train {target}")
        if train is None:
            train = str(folder / CHECKPOINT)
            if not Path(train).is_dir():
                raise TracefpError(
                    f"{folder} has no {CHECKPOINT}/ (a run writes it at its end): name one by --train DIR"
                )
    config = load_config(source, settings, RunConfig)
    return config if train is None else _with_model(config, train)


def _is_checkpoint(config: Path) -> bool:
    """Whether a config.json is a model's; a run's has the same name."""
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


def _with_settings(settings: list[str], train: str) -> RunConfig:
    """The defaults with settings applied, by the one parser there is for them, which reads recipes."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "settings.toml"
        recipe.write_text(f"[model]\npath = {json.dumps(train)}\n", encoding="utf-8")
        return load_config(recipe, settings, RunConfig)


def _with_model(config: RunConfig, path: str) -> RunConfig:
    return config.model_copy(update={"model": config.model.model_copy(update={"path": path})})


def read_prompts(request: LiveRequest, parts: Parts) -> list[Prompt]:
    """The first ``count`` prompts. Raises TracefpError, naming file and line, for a row without one."""
    if request.prompts is None:
        return list(parts.task.test_prompts(request.count))
    path = request.prompts
    if path.suffix == ".txt" and path.is_file():
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise TracefpError(f"--prompts {path} is not UTF-8 (at byte {error.start}); save it as UTF-8") from None
        rows = [
            Row(f"{path} line {i}", {"prompt": line}) for i, line in enumerate(text.splitlines(), 1) if line.strip()
        ]
        if not rows:
            raise TracefpError(f"--prompts {path} is empty: it has no lines")
    else:
        rows = read_rows(path, "--prompts")
    return [_prompt(i, row) for i, row in enumerate(rows[: request.count])]


def _prompt(index: int, row: Row) -> Prompt:
    value: Any = next((row.values[key] for key in PROMPT_KEYS if row.values.get(key)), None)
    if isinstance(value, str):
        return Prompt(f"prompt{index}", value, "")
    if isinstance(value, list) and value and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value):
        messages = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in value)
        return Prompt(f"prompt{index}", "\n".join(m["content"] for m in messages), "", messages=messages)
    raise TracefpError(
        f"{row.where} has no prompt: it needs a text or chat messages in one of {', '.join(PROMPT_KEYS)}"
    )
