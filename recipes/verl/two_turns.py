"""An agent loop of two turns: the policy answers, is shown the sum once more, and its second answer counts."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


class TwoTurns(AgentLoopBase):
    """Knows nothing of guidance: the client and the worker of tracefp4 carry it.

    prompt, answer (at most half of the response), prompt again (no loss), answer.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        room = self.rollout_config.response_length - len(prompt)
        params = {**sampling_params, "max_tokens": room // 2}
        session = uuid4().hex
        first = await self.server_manager.generate(session, prompt_ids=prompt, sampling_params=params)
        tokens = [*prompt, *first.token_ids, *prompt]
        second = await self.server_manager.generate(session, prompt_ids=tokens, sampling_params=params)
        answers = (first.token_ids, second.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first.token_ids, *prompt, *second.token_ids],
            response_mask=[*(1 for _ in answers[0]), *(0 for _ in prompt), *(1 for _ in answers[1])],
            response_logprobs=[*first.log_probs, *(0.0 for _ in prompt), *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(),
            extra_fields=second.extra_fields | {"turn_scores": [], "tool_rewards": []},
        )
