"""Plans whose runs are made up by a short script in place of training."""

from collections.abc import Callable
from pathlib import Path

import pytest

from made_up_runs import MADE, RUN, script
from tracefp4.reproduce import plan as plan_module
from tracefp4.reproduce.plan import Plan, Request, Spec, make_plan, open_plan


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Plan]:
    """``made_up(steps=20, pause=0, sources={"qat": ...}, modes=...)``: a plan in tmp_path/out, its start there."""

    def make(
        steps: int = 20,
        pause: float = 0.0,
        sources: dict[str, str] | None = None,
        modes: tuple[str, ...] = ("bf16", "qat", "trace"),
        seeds: tuple[int, ...] = (0, 1),
        experiment: str = "dynamics",
        folder: str = "out",
        settings: tuple[str, ...] = (),
    ) -> Plan:
        def command(spec: Spec) -> list[str]:
            return script(spec, (sources or {}).get(spec.arm.mode, RUN), pause)

        monkeypatch.setattr(plan_module.Spec, "command", command)
        request = Request(experiment, None, modes, seeds, steps, True, settings=settings)
        plan = make_plan(request, tmp_path / folder)
        for start in plan.starts:
            start.mkdir(parents=True, exist_ok=True)
            (start / "warmstart.json").write_text(MADE)
        plan.out.mkdir(exist_ok=True)
        open_plan(plan)
        return plan

    return make
