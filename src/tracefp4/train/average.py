"""A moving average of a policy's weights while it is trained."""

from __future__ import annotations

from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Qwen3MoeForCausalLM


class Average:
    """Moving average of a model's weights, itself a model; with decay 0 the model itself."""

    def __init__(self, model: Qwen3MoeForCausalLM, decay: float) -> None:
        self._averaged, self.model = None, model
        if decay:
            self._averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
            assert isinstance(self._averaged.module, Qwen3MoeForCausalLM)
            self.model = self._averaged.module

    def add(self, model: Qwen3MoeForCausalLM) -> None:
        if self._averaged is not None:
            self._averaged.update_parameters(model)

    def start_from(self, weights: dict[str, Tensor]) -> None:
        """The average is these weights, and goes on from them."""
        if self._averaged is not None:
            self.model.load_state_dict(weights)
            self._averaged.n_averaged.fill_(1)
