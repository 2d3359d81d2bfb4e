"""A task of several turns: a checker as the policy's tool.

    python examples/tool_use.py

The policy writes out a sum. Where the result is wrong the environment asks again, up to two more times; what the last
turn answers is scored. Prints an exchange, how many tokens came from the environment (they have rows and records as a
prompt's have, and teach nothing), and one training step. The built-in policy has never seen a second turn: expect no
good use of it.
"""

from collections.abc import Sequence

from tracefp4.loop import RunConfig, TrainingRun
from tracefp4.tasks import Prompt
from tracefp4.tasks.running_sums import RunningSums, RunningSumsConfig

SETTINGS = {
    "method": {"name": "trace-all"},
    "sampling": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 120},
    "rollout": {"max_model_len": 160, "max_num_seqs": 16},
    "train": {"updates_per_rollout": 1},
    "run": {"threads": 1},
}


class Checked(RunningSums):
    """Running sums with a checker. ``respond`` is all that makes a task one of several turns."""

    def __init__(self, max_turns: int) -> None:
        super().__init__(RunningSumsConfig(max_terms=3))
        self.max_turns = max_turns

    def respond(self, prompt: Prompt, turns: Sequence[str]) -> str | None:
        """The reply to the last turn, as text that the policy goes on from; None where the exchange is over."""
        if len(turns) == self.max_turns or self.score(prompt, turns[-1]) == 1.0:
            return None
        return prompt.text


def main() -> None:
    run = TrainingRun(RunConfig.model_validate(SETTINGS), task=Checked(max_turns=3))

    # What a step does, by hand: the engine asks `exchanges` whenever a turn has ended.
    prompts = run.task.test_prompts(8)
    requests = run.parts.requests(prompts, samples=1, tag="look")
    exchanges = run.parts.exchanges({r.request_id: p for r, p in zip(requests, prompts, strict=True)})
    trajectories = run.engine.generate(requests, on_turn=exchanges)
    rewards = run.parts.score(prompts, trajectories, exchanges)
    run.store.discard([t.guidance for t in trajectories])

    longest = max(range(len(prompts)), key=lambda i: len(exchanges.turns[requests[i].request_id]))
    for turn in exchanges.turns[requests[longest].request_id]:
        print(f"environment  {prompts[longest].text}\npolicy       {turn}")
    print(f"reward       {rewards[longest]}")
    tokens = sum(len(t.response_ids) for t in trajectories)
    foreign = tokens - sum(t.num_sampled for t in trajectories)
    print(f"{foreign} of {tokens} response tokens are the environment's")

    metrics, _ = run.step(0)
    print(f"a step: reward {metrics['reward/mean']:.2f}, guided rows {metrics['guidance/guided_share']:.2f}", end=", ")
    print(f"|log p difference| {metrics['mismatch/logprob_abs_diff_mean']:.4f}")


if __name__ == "__main__":
    main()
