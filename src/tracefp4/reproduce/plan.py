"""What a folder is to hold, and what it holds already.

    plan.json                        what was asked for, from which commit; with every invocation that went on with it
    recipes/<table>.json             the RL recipe that all arms of a table share
    <table>/<arm>/seed<k>/           a run folder each; seed<k>.log, eval-seed<k>/, seed<k>.failed.json beside it
    results.json, results.md, results.html, report.html, figures/

Warm starts lie beside the folders of the commands, in starts/<rung>-<hash>/, as several commands share them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tracefp4.compare import SEED_KEY, run_folder, train_command
from tracefp4.config import ConfigError, resolved, with_overrides
from tracefp4.device import resolve_device
from tracefp4.evaluate import EVAL
from tracefp4.evaluate.target import FP4, make_forms
from tracefp4.files import LOCK, warn
from tracefp4.loop import RunConfig
from tracefp4.methods import list_methods
from tracefp4.report import ensure_dir, provenance, write_json_atomic
from tracefp4.report.logger import is_complete
from tracefp4.report.provenance import append_resume
from tracefp4.reproduce.experiments import CONTROL, EXPERIMENTS, Arm, Experiment, Table, chosen, on_rung
from tracefp4.reproduce.rung import TINY, RungConfig, load_rung

PLAN, RECIPES, STARTS, SCORES = "plan.json", "recipes", "starts", "scores.json"
DEFAULT_RUNG = "ladder-6"
TINY_STEPS = 3


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None and () take the experiment's own. device: auto, cpu or cuda; settings:
    overrides of the rung's recipe."""

    experiment: str
    recipe: str | None = None
    modes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    steps: int | None = None
    tiny: bool = False
    device: str = "auto"
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One run. form: that in which its rollouts ran, a name for ``--forms``; forms: all that are evaluated; evaluation:
    (problems, responses to each), None where the policy is not evaluated; start: the folder of its warm start; config:
    what its config.json will hold, in the form of ``canonical``."""

    out: Path
    table: Table
    arm: Arm
    seed: int
    steps: int
    settings: tuple[str, ...]
    form: str
    forms: tuple[str, ...]
    evaluation: tuple[int, int] | None
    start: Path
    config: str = ""

    @property
    def name(self) -> str:
        return f"{self.table.key}/{self.arm.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Of the arm."""
        return self.out / self.table.key / self.arm.folder

    @property
    def run_dir(self) -> Path:
        return run_folder(self.out, f"{self.table.key}/{self.arm.folder}", self.seed)

    @property
    def policy_dir(self) -> Path:
        """The run folder whose policy is evaluated."""
        source = next((a for a in self.table.arms if a.name == self.arm.policy_of), self.arm)
        return run_folder(self.out, f"{self.table.key}/{source.folder}", self.seed)

    @property
    def eval_dir(self) -> Path:
        return self.folder / f"eval-seed{self.seed}"

    @property
    def failure(self) -> Path:
        """Says why the training of its policy ended early for good: it diverged, or a watchdog stopped it."""
        return self.policy_dir.with_name(f"seed{self.seed}.failed.json")

    @property
    def origin(self) -> Path:
        """Says from which other run this one was taken over."""
        return self.folder / f"seed{self.seed}.origin.json"

    @property
    def trains(self) -> bool:
        return not self.arm.policy_of

    @property
    def trained(self) -> bool:
        return is_complete(self.policy_dir, self.steps)

    @property
    def evaluated(self) -> bool:
        return self.evaluation is None or (self.eval_dir / SCORES).is_file()

    @property
    def needs_start(self) -> bool:
        """Whether its training has to begin, or go on: an evaluation reads the trained policy alone."""
        return self.trains and not self.trained

    @property
    def failed(self) -> bool:
        return self.failure.is_file()

    @property
    def done(self) -> bool:
        return self.failed or (self.trained and self.evaluated)

    def command(self) -> list[str]:
        """The command that trains it and evaluates its policy, or goes on with either."""
        recipe = self.out / RECIPES / f"{self.table.key}.json"
        python, _, _, *train = train_command(str(recipe), self.arm.mode, [self.seed], self.folder, self.settings)
        if self.evaluation is None:
            return [python, "-m", "tracefp4", *train, "--resume"]
        problems, samples = self.evaluation
        sizes = ["--problems", str(problems), "--samples", str(samples), "--forms", ",".join(self.forms)]
        evaluate = ["eval", str(self.policy_dir), *self.arm.evaluated, "--out", str(self.eval_dir), *sizes, "--resume"]
        both = [*train, "--resume", "+", *evaluate] if self.needs_start else [*evaluate, "--end-with-stdin"]
        return [python, "-m", "tracefp4", "chain", "--", *both]


@dataclass(frozen=True)
class Plan:
    """A command's runs and the warm starts that they need."""

    out: Path
    experiment: Experiment
    request: Request
    seeds: tuple[int, ...]
    steps: int
    device: str
    specs: tuple[Spec, ...]
    starts: dict[Path, RungConfig]

    def of_table(self, key: str) -> list[Spec]:
        return [spec for spec in self.specs if spec.table.key == key]

    @property
    def complete(self) -> bool:
        return all(spec.done for spec in self.specs)


def make_plan(request: Request, out: Path, to_run: bool = True) -> Plan:
    """All runs of a command, seed by seed, so that an interrupted one holds whole comparisons. Touches no file.

    to_run: False for a plan that is looked at only, and may be another machine's.

    Raises:
        ConfigError: a name is unknown, a recipe or a setting of an arm cannot be used, or the device is not there.
    """
    if request.experiment not in EXPERIMENTS:
        raise ConfigError(f"there is no reproduce {request.experiment}: one of {', '.join(EXPERIMENTS)}")
    experiment = chosen(EXPERIMENTS[request.experiment], request.modes, [m.name for m in list_methods()])
    experiment = on_rung(experiment, request.recipe)
    check_overrides(request.settings, experiment.tables)
    seeds = request.seeds or ((0,) if request.tiny else experiment.seeds)
    steps = request.steps or (TINY_STEPS if request.tiny else experiment.steps)
    device, on_device = device_settings(request.device) if to_run else (request.device, ())
    starts: dict[Path, RungConfig] = {}
    specs: dict[tuple[str, str], list[Any]] = {}
    for table in experiment.tables:
        rung, start = _start(request, table, out)
        starts[start] = rung
        recipe = rung.recipe(str(start))
        for arm in table.arms:
            settings = (*table.settings, *arm.settings, f"run.steps={steps}", *on_device)
            config = make_config(recipe, table, arm, settings)
            form, forms = _forms(config, rung.start.model.num_layers, arm)
            sizes = (rung.evaluation.problems, rung.evaluation.samples)
            specs[table.key, arm.name] = [table, arm, settings, form, forms, sizes, start, config]
    ordered = tuple(
        Spec(out, table, arm, seed, steps, settings, form, forms, sizes, start, canonical(config, seed))
        for seed in seeds
        for table, arm, settings, form, forms, sizes, start, config in specs.values()
    )
    return Plan(out, experiment, request, tuple(seeds), steps, device, ordered, starts)


def _start(request: Request, table: Table, out: Path) -> tuple[RungConfig, Path]:
    return warm_start(table.rung or request.recipe or DEFAULT_RUNG, out, request.tiny, request.settings)


def warm_start(name: str, out: Path, tiny: bool, settings: Sequence[str]) -> tuple[RungConfig, Path]:
    """A rung's recipe under these overrides, and the folder of its warm start, beside ``out``."""
    rung = load_rung(name, tiny, settings)
    label = f"{TINY}-{rung.start.model.num_layers}" if tiny else Path(name).stem
    return rung, out.parent / STARTS / f"{label}-{rung.start_hash}"


def check_overrides(settings: Sequence[str], tables: Sequence[Table]) -> None:
    """Raises ConfigError where an override names what an option or a table sets."""
    taken = {_key(text): t.key for t in tables for arm in t.arms for text in (*t.settings, *arm.settings)}
    flags = {"run.steps": "--steps", SEED_KEY: "--seeds", "run.device": "--device"}
    for text in settings:
        if (key := _key(text)) in flags:
            raise ConfigError(f"the override '{text}' contradicts {flags[key]}, which sets {key}")
        if key in taken:
            raise ConfigError(f"the override '{text}' contradicts the table {taken[key]}, whose rows set {key}")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def make_config(recipe: dict[str, Any], table: Table, arm: Arm, settings: Sequence[str]) -> RunConfig:
    """Of an arm's run with seed 0; of one that evaluates another's policy, of its evaluation."""
    overrides = [*settings, *arm.evaluated, f"method.name={arm.mode}", f"{SEED_KEY}=0"]
    try:
        return with_overrides(copy.deepcopy(recipe), overrides, RunConfig, "the recipe")
    except ConfigError as error:
        raise ConfigError(f"{table.key}, {arm.name}: {error}") from None


def canonical(config: RunConfig | dict[str, Any], seed: int | None = None) -> str:
    """What two runs must agree in to be the same: all of a resolved recipe but the folder of the warm start. seed: in
    place of the recipe's."""
    facts = config if isinstance(config, dict) else resolved(config)
    model = {**facts["model"], "path": Path(facts["model"]["path"]).name}
    run = facts["run"] if seed is None else {**facts["run"], "seed": seed}
    return json.dumps({**facts, "model": model, "run": run}, sort_keys=True)


def _forms(config: RunConfig, layers: int, arm: Arm) -> tuple[str, tuple[str, ...]]:
    """(the form of the arm's rollouts, all forms to evaluate): BF16, FP4, and the rollout's own where it is neither."""
    own = FP4 if arm.policy_of and arm.mode == CONTROL else arm.mode
    numbers = {}
    for name in dict.fromkeys((CONTROL, FP4, own)):
        form = make_forms([name], config, layers)[0]
        numbers[name] = (form.recipe.hash, form.dtype, form.calibrated)
    known = next(name for name in numbers if numbers[name] == numbers[own])
    return known, tuple(dict.fromkeys((CONTROL, FP4, known)))


def device_settings(asked: str) -> tuple[str, tuple[str, ...]]:
    """(the device, the settings of a run on it)."""
    if asked not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, got {asked!r}")
    device = resolve_device(asked, "--device")
    return device, (f"run.device={device}",)


# In the folder


def open_plan(plan: Plan) -> dict[str, Any]:
    """Writes plan.json and the recipes into a folder that the caller has locked; returns plan.json's content.

    Raises:
        ConfigError: the folder holds another command's runs, or this one's by other settings.
    """
    asked = {
        "experiment": plan.experiment.name,
        "recipe": plan.request.recipe,
        "profile": TINY if plan.request.tiny else "full",
        "device": plan.device,
        "settings": list(plan.request.settings),
        "steps": plan.steps,
        "starts": {start.name: resolved(rung) for start, rung in plan.starts.items()},
    }
    size = {"seeds": list(plan.seeds), "modes": list(plan.request.modes), "tables": _described(plan.experiment)}
    before, now = read_plan(plan.out), provenance()
    if before:
        _check_same(plan.out, before, asked, size)
        if changed := append_resume(before, now):
            warn(f"{plan.out} goes on with {changed}: its tables may not be those of unbroken runs")
    else:
        check_vacant(plan.out, PLAN)
    facts = (before or now | {"resumes": []}) | asked | size
    ensure_dir(plan.out / RECIPES)
    for table in plan.experiment.tables:
        rung, start = _start(plan.request, table, plan.out)
        write_recipe(plan, table, rung.recipe(str(start)))
    write_json_atomic(plan.out / PLAN, facts)
    return facts


def write_recipe(plan: Plan, table: Table, recipe: dict[str, Any]) -> None:
    """Writes what a table's runs are trained by.

    Raises AssertionError where a run would be another one than was planned, whose name and figures it would bear.
    """
    for spec in plan.specs:
        if spec.table is table and spec.trains:
            config = make_config(recipe, table, spec.arm, spec.settings)
            if canonical(config, spec.seed) != spec.config:
                raise AssertionError(f"{spec.name} would be trained by other settings than those of its row")
    write_json_atomic(plan.out / RECIPES / f"{table.key}.json", recipe)


def check_vacant(out: Path, plan: str) -> None:
    """Raises ConfigError where a folder that the caller has locked holds anything, and not the plan of its command."""
    if out.is_dir() and not (out / plan).exists():
        found = sorted(path.name for path in out.iterdir() if path.name != LOCK)
        if found:
            raise ConfigError(f"{out} holds {found[0]} and no {plan}, so it is of something else: choose another --out")


def read_plan(out: Path) -> dict[str, Any]:
    """plan.json of a folder; {} where there is none. Raises ConfigError where it is damaged."""
    try:
        facts: dict[str, Any] = json.loads((out / PLAN).read_bytes())
        if not isinstance(facts, dict):
            raise ValueError("it is no JSON object")
        if not isinstance(facts.get("experiment"), str) or not isinstance(facts.get("seeds"), list):
            raise ValueError("it names no experiment and seeds")
        return facts
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{out / PLAN} cannot be read ({error}): reproduce into another --out") from None


def stored_request(facts: dict[str, Any]) -> Request:
    """The request that a plan.json answers, with all that later invocations added."""
    return Request(
        facts["experiment"],
        facts["recipe"],
        tuple(facts["modes"]),
        tuple(facts["seeds"]),
        facts["steps"],
        facts["profile"] == TINY,
        facts["device"],
        tuple(facts["settings"]),
    )


def _described(experiment: Experiment) -> dict[str, Any]:
    return {
        table.key: {"title": table.title, "arms": [asdict(arm) for arm in table.arms]} for table in experiment.tables
    }


def _check_same(out: Path, before: dict[str, Any], asked: dict[str, Any], size: dict[str, Any]) -> None:
    for key, value in json.loads(json.dumps(asked)).items():
        if before.get(key) == value:
            continue
        if key == "starts":
            raise ConfigError(f"the recipe has changed since {out} was begun: set it back, or choose another --out")
        if key == "settings":
            raise ConfigError(f"{out} has other overrides ({', '.join(before[key]) or 'none'}): give the same")
        had = f"no --{key}" if before.get(key) is None else f"--{key} {before[key]}"
        now = "none" if value is None else value
        raise ConfigError(f"{out} has {had}, now it is {now}: give the same, or choose another --out")
    missing = [seed for seed in before["seeds"] if seed not in size["seeds"]]
    if missing:
        raise ConfigError(f"{out} has seed {missing[0]} too, which --seeds leaves out: give all of them, or more")
    for key, table in before["tables"].items():
        arms = [arm["label"] or arm["mode"] for arm in size["tables"].get(key, {"arms": []})["arms"]]
        for arm in table["arms"]:
            if (name := arm["label"] or arm["mode"]) not in arms:
                raise ConfigError(f"{out} has {name} in {key} too, which --modes leaves out: give all of them, or more")


def scores_of(spec: Spec) -> dict[str, Any] | None:
    """The scores.json of an evaluated run: {"forms": {form: rewards [problem][sample]}, "seconds"}; None before."""
    try:
        scores: dict[str, Any] = json.loads((spec.eval_dir / SCORES).read_bytes())
        return scores
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{spec.eval_dir / SCORES} cannot be read ({error}): remove it to evaluate again") from None


def write_scores(spec: Spec) -> None:
    """Keeps of a whole evaluation what tables need: every reward, not every response."""
    facts = json.loads((spec.eval_dir / EVAL).read_bytes())
    drawn = spec.evaluation[1] if spec.evaluation else 0
    forms, seconds = {}, 0.0
    for form in spec.forms:
        lines = (spec.eval_dir / f"responses-{form}.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        samples = [[s["reward"] for s in json.loads(line)["samples"]] for line in lines]
        forms[form] = [rewards or [0.0] * drawn for rewards in samples]
    for line in (spec.eval_dir / "timing.jsonl").read_text(encoding="utf-8").splitlines():
        seconds += json.loads(line)["seconds"]
    write_json_atomic(spec.eval_dir / SCORES, {"forms": forms, "seconds": seconds, "commit": facts.get("commit")})
