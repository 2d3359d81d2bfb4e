"""Watchdogs: from the metrics of a run to sentences that say what is wrong, what it usually means and what to do.

    watch = Watch(WatchConfig(), resolved(run_config), report=print)
    for step in ...:
        if watch.check(step, metrics):
            break  # a watchdog set to "stop" has spoken; watch.stopped is its event

What is said depends on nothing but the config and the metrics seen so far, so a resumed run that replays the lines of
metrics.jsonl goes on as the unbroken one would have. The rules themselves are in ``watch_rules``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from tracefp4.align.watch_rules import RULES, Rule, Seen
from tracefp4.config import StrictModel

Level = Literal["off", "warn", "stop"]


class WatchConfig(StrictModel):
    """Each watchdog: "off", "warn" or "stop" (docs/watchdogs.md says what each sees).

    patience: a condition must hold for so many steps in a row, where the watchdog has no count of its own. cooldown:
    steps until a watchdog warns again of what lasts; it warns earlier where the figure has grown ``worse``-fold.
    baseline_steps: the run's own start is the median of so many first steps.
    mismatch_factor: times the start; mismatch_limit: nats, whatever the start. drift_window, drift_growth: steps of
    the trend, and how far it must have risen within them. mismatch_max_limit: of a single token, nats.
    entropy_share, entropy_floor: of the start, and nats. entropy_factor: times the start. no_advantage_share,
    no_advantage_window: mean over so many steps. guided_share: least share of guided rows. grad_norm_factor: times
    the running median. tis_clip_share: of tokens above train.tis_cap, of responses with a weight of TBPO's that is more
    than 0.1 away from 1. truncated_share: of responses.
    reward_zero_steps: steps without any reward.
    command: run in a shell at every event and at the run's end, with a JSON object on standard input; command_seconds:
    how long it may take.
    """

    mismatch: Level = "warn"
    mismatch_drift: Level = "warn"
    mismatch_max: Level = "off"
    entropy_collapse: Level = "warn"
    entropy_explosion: Level = "warn"
    no_advantage: Level = "warn"
    guidance: Level = "warn"
    nonfinite: Level = "stop"
    grad_norm: Level = "warn"
    importance: Level = "warn"
    sequence_weight: Level = "warn"
    truncation: Level = "warn"
    reward_zero: Level = "warn"
    lag: Level = "warn"

    patience: int = Field(3, ge=1)
    cooldown: int = Field(50, ge=1)
    worse: float = Field(2.0, gt=1)
    baseline_steps: int = Field(5, ge=1)
    mismatch_factor: float = Field(3.0, gt=1)
    mismatch_limit: float = Field(0.1, gt=0)
    drift_window: int = Field(50, ge=10, le=1000)
    drift_growth: float = Field(1.5, gt=1)
    mismatch_max_limit: float = Field(10.0, gt=0)
    entropy_share: float = Field(0.1, ge=0, lt=1)
    entropy_floor: float = Field(0.01, ge=0)
    entropy_factor: float = Field(3.0, gt=1)
    no_advantage_share: float = Field(0.9, ge=0, lt=1)
    no_advantage_window: int = Field(10, ge=1)
    guided_share: float = Field(0.99, ge=0, le=1)
    grad_norm_factor: float = Field(20.0, gt=1)
    tis_clip_share: float = Field(0.01, ge=0, lt=1)
    truncated_share: float = Field(0.5, ge=0, lt=1)
    reward_zero_steps: int = Field(10, ge=1)
    command: str = ""
    command_seconds: float = Field(30.0, gt=0, le=600)


@dataclass(frozen=True)
class Event:
    """What a watchdog said: a line of events.jsonl. level: "warn" or "stop". figures: what the message rests on."""

    step: int
    name: str
    level: str
    message: str
    figures: dict[str, float] = field(default_factory=dict)


class Watch:
    """All watchdogs of a run.

    settings: the resolved RunConfig, from which messages quote current values; without it they name keys alone.
    report: called with every event of ``check``.
    """

    def __init__(
        self,
        config: WatchConfig,
        settings: Mapping[str, Any] | None = None,
        report: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.stopped: Event | None = None
        self._report = report
        guards = [(rule, getattr(config, rule.name)) for rule in RULES]
        self._guards = [
            _Guard(rule(config, settings or {}), level, config.cooldown, config.worse)
            for rule, level in guards
            if level != "off"
        ]

    def check(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Sees one step and reports its events; True where one of them is to end the run."""
        for event in self.see(step, metrics):
            self._report(event)
            if event.level == "stop" and self.stopped is None:
                self.stopped = event
        return self.stopped is not None

    def see(self, step: int, metrics: Mapping[str, Any]) -> list[Event]:
        """The events of one step, in the order of the rules; call once a step. None stands for a non-finite value."""
        finite: dict[str, float] = {}
        broken = []
        for name in sorted(metrics):
            value = math.nan if metrics[name] is None else float(metrics[name])
            if math.isfinite(value):
                finite[name] = value
            else:  # NaN or infinite: metrics.jsonl does not tell them apart, so neither does a watchdog
                broken.append(name)
        seen = Seen(step, finite, tuple(broken))
        return [event for guard in self._guards if (event := guard.see(seen)) is not None]

    def replay(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Sees lines of metrics.jsonl again without reporting: the state of a run that was interrupted after them."""
        for line in lines:
            self.see(line["step"], {name: value for name, value in line.items() if name != "step"})

    def summary(self) -> dict[str, Any]:
        """What final.json says of a run that a watchdog ended: its finished steps, and why. Empty for another."""
        if self.stopped is None:
            return {}
        event = self.stopped
        return {
            "steps": event.step + 1,
            "stopped_by": {"name": event.name, "step": event.step, "message": event.message},
        }


class _Guard:
    """One rule with its patience, its cool-down and its level."""

    def __init__(self, rule: Rule, level: Level, cooldown: int, worse: float) -> None:
        self.rule, self.level, self.cooldown, self.worse = rule, level, cooldown, worse
        self._severities: deque[float] = deque(maxlen=rule.patience)
        self._last: tuple[int, float] | None = None

    def see(self, seen: Seen) -> Event | None:
        """A step that lacks the rule's metrics neither adds to its patience nor takes from it."""
        if any(name not in seen.values for name in self.rule.needs):
            return None
        finding = self.rule.look(seen)
        if finding is None:
            self._severities.clear()
            return None
        self._severities.append(finding.severity)
        if len(self._severities) < self.rule.patience:
            return None
        severity = min(self._severities)  # a single spike inside a lasting condition is not "much worse"
        if not self._due(seen.step, severity):
            return None
        self._last = (seen.step, severity)
        if self.level == "stop":
            self._severities.clear()  # who resumes a stopped run gets the full patience again
        return Event(seen.step, self.rule.name, self.level, finding.message, finding.figures)

    def _due(self, step: int, severity: float) -> bool:
        if self.level == "stop" or self._last is None:
            return True
        last_step, last_severity = self._last
        return step - last_step >= self.cooldown or severity >= self.worse * last_severity
