"""AdamW on FP32 master weights beside a model in the compute dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

_ADAM = (("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq"), ("step", "steps"))


class MasterOptimizer:
    """The model computes in its own dtype; gradients are summed and weights updated in FP32.

    A BF16 weight alone would swallow updates below 1/256 of its size, which is most of them at RL learning rates.
    Where the model is FP32 the masters are its own parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        grad_clip: float,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.params]
        self.grad_clip = grad_clip
        decay = [m for m in self.masters if m.ndim >= 2]
        no_decay = [m for m in self.masters if m.ndim < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, foreach=True)

    def accumulate(self) -> None:
        """Adds the model's gradients to the masters' and clears the former; call after each backward."""
        first: tuple[list[Tensor], list[Tensor]] = ([], [])
        more: tuple[list[Tensor], list[Tensor]] = ([], [])
        for p, m in zip(self.params, self.masters, strict=True):
            if p is m or p.grad is None:
                continue
            to, grads = first if m.grad is None else more
            if m.grad is None:
                m.grad = torch.empty_like(m)
            to.append(m.grad)
            grads.append(p.grad)
            p.grad = None
        if first[0]:
            torch._foreach_copy_(*first)
        if more[0]:
            torch._foreach_add_(*more)

    def step(self, lr: float) -> float:
        """Clips, updates, writes the weights back; returns the gradient norm before clipping.

        Raises FloatingPointError and leaves all weights as they were when the norm is not finite.
        """
        norm = float(nn.utils.clip_grad_norm_(self.masters, self.grad_clip))
        if not math.isfinite(norm):
            self.drop()
            raise FloatingPointError(f"gradient norm is {norm}; the update was not applied")
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.drop()
        with torch.no_grad():
            pairs = [(p, m) for p, m in zip(self.params, self.masters, strict=True) if p is not m]
            if pairs:
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        return norm

    def drop(self) -> None:
        """Forgets what was accumulated."""
        self.adamw.zero_grad(set_to_none=True)

    def state_tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Masters and AdamW moments, f32, as ``master.NAME``, ``exp_avg.NAME``, ``exp_avg_sq.NAME``, ``steps.NAME``."""
        out: dict[str, Tensor] = {}
        for name, master in self._named_masters(model):
            out[f"master.{name}"] = master.detach()
            for key, label in _ADAM:
                if key in self.adamw.state[master]:
                    out[f"{label}.{name}"] = self.adamw.state[master][key]
        return out

    def load_state_tensors(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Inverse of ``state_tensors``; sets the model's weights too. Raises KeyError for a missing tensor."""
        with torch.no_grad():
            for (name, master), p in zip(self._named_masters(model), self.params, strict=True):
                master.copy_(tensors[f"master.{name}"])
                if p is not master:
                    p.copy_(master)
                if f"exp_avg.{name}" in tensors:
                    self.adamw.state[master] = {
                        key: tensors[f"{label}.{name}"].to(master.device if label != "steps" else "cpu").clone()
                        for key, label in _ADAM
                    }

    def _named_masters(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        names = {id(p): name for name, p in model.named_parameters()}
        return [(names[id(p)], m) for p, m in zip(self.params, self.masters, strict=True)]
