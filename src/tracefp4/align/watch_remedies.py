"""What a watchdog tells the user to do, where that depends on more than the figure it watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tracefp4.align.watch_rules import Rule, Seen


def mismatch_remedy(rule: Rule, seen: Seen) -> str:
    """What to do about a growing distance, by what the run does already."""
    slower = f"lower {rule.key('train.lr')} or {rule.key('train.updates_per_rollout')}"
    method = rule.setting("method.name")
    if "guidance/guided_share" in seen.values:
        if method == "trace-all":
            return f"Every layer is guided already: {slower}, and see that guidance/guided_share is 1."
        return f"Guide every layer with method.name=trace-all (now {method}), or {slower}."
    if "code_mismatch/before" in seen.values or method in ("naive", "qat"):
        return f"The trainer rounds without guidance: use method.name=trace-all (now {method}), or {slower}."
    return f"Nothing is quantized here, so the updates are too large: {slower}."


def no_advantage_remedy(rule: Rule, reward: float | None, best: float) -> str:
    """What to do where groups agree, by whether they succeed or fail. best: the highest mean reward so far."""
    if reward is not None and reward < 0.1 * best and best >= 0.1:
        return (
            f"The mean reward has fallen from {best:.2g} to {reward:.2g}: the policy has collapsed, so lower "
            f"{rule.key('train.lr')} and start from an earlier state."
        )
    spread = (
        f"or raise {rule.key('sampling.samples_per_prompt')} or {rule.key('sampling.temperature')} so that the "
        "responses of a group differ."
    )
    if reward is None:
        return f"Change the difficulty of the problems of [task], {spread}"
    too, better = ("easy", "harder") if reward >= 0.5 else ("hard", "easier")
    return f"With a mean reward of {reward:.2g} the problems are too {too}: make those of [task] {better}, {spread}"


FALLBACKS: dict[str, tuple[str, Callable[[Rule], str]]] = {
    "missing": (
        "the trainer found no record of them",
        lambda r: (
            f"See that every rollout worker runs this recipe ({r.key('method.name')}) and that the store keeps records "
            "until the update is done."
        ),
    ),
    "checksum": (
        "stored bytes changed after they were written",
        lambda r: (
            "Check the disk, memory or link that the store uses; until it is mended, method.name=qat trains without "
            "records."
        ),
    ),
    "recipe": (
        "they were recorded under another recipe",
        lambda r: (
            f"Start rollout and trainer with the same {r.key('quant.activations')}, {r.key('quant.kv')}, "
            f"{r.key('quant.encode_scale')} and {r.key('method.name')}."
        ),
    ),
    "rows": (
        "the record has another number of tokens than the trajectory",
        lambda r: (
            "Something cut or extended responses after the rollout: pass its token ids on unchanged, and see that "
            f"{r.key('rollout.max_model_len')} holds prompt and response."
        ),
    ),
    "token": (
        "the trainer has other tokens there than the rollout forwarded",
        lambda r: (
            f"Text was tokenized again: pass the rollout's token ids on, with one tokenizer ({r.key('model.path')}) "
            "on both sides."
        ),
    ),
    "stale": (
        "they were recorded under weights that are too old",
        lambda r: (
            f"Send weights to the rollout more often, or raise {r.key('train.max_version_diff')} if the mismatch "
            "allows it."
        ),
    ),
    "invalid": (
        "their sequences were preempted and computed twice, so no single record is right",
        lambda r: (
            f"Give the cache more pages by {r.key('rollout.num_pages')}, or lower {r.key('rollout.max_num_seqs')}, so "
            "that nothing is preempted."
        ),
    ),
}
"""Reason of a fallback -> (what it means, what to do)."""
