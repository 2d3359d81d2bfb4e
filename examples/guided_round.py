"""The core in ten lines: a rollout's FP4 slots, recorded in about one bit a value, and a trainer that rounds to them.

    python examples/guided_round.py

Rollout and trainer hold the same weights and differ by the noise of two engines. Prints the share of activations that
land in another FP4 slot than the rollout's, by nearest rounding and guided, and that the gradient passes through.
"""

import torch
from torch import Tensor, nn

from tracefp4.formats import QuantizedBlocks, decode_e2m1, get_format
from tracefp4.guidance import CompactGuidance, decode, encode
from tracefp4.nn import fake_quantize, guided_round

NVFP4 = get_format("nvfp4")


class Layer(nn.Module):
    """An MLP whose input is rounded to NVFP4: to the recorded slots where there is a record, else to nearest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, record: CompactGuidance | None = None) -> Tensor:
        rounded = fake_quantize(x, "nvfp4") if record is None else guided_round(x, record)
        return self.down(torch.relu(self.up(rounded)))


def mismatch(ours: QuantizedBlocks, rollout: QuantizedBlocks) -> float:
    """Share of values that are in another slot."""
    slots = [decode_e2m1(blocks.unpacked_codes()) for blocks in (ours, rollout)]
    return (slots[0] != slots[1]).double().mean().item()


def main() -> None:
    torch.manual_seed(0)
    layer, x_rollout = Layer(256), torch.randn(512, 256)
    x_trainer = (x_rollout * (1 + 0.01 * torch.randn(512, 256))).requires_grad_()  # the other engine's rounding

    blocks = NVFP4.quantize(x_rollout, encode_scale="row")  # what the rollout computes with
    record = encode(blocks, bits=1.125)  # what it sends: the mantissa bit of each code, two bits of each scale
    chosen, _ = decode(record, x_trainer)  # the trainer finds the slots again

    nearest = mismatch(NVFP4.quantize(x_trainer, encode_scale="row"), blocks)
    guided = mismatch(chosen, blocks)
    print(f"record: {8 * record.payload.numel() / x_rollout.numel():.3f} bits a value")
    print(f"slots off the rollout's: nearest {nearest:.2%}, guided {guided:.2%}")

    y_rollout = layer(x_rollout)
    for name, y in (("nearest", layer(x_trainer)), ("guided", layer(x_trainer, record))):
        (gradient,) = torch.autograd.grad(y.sum(), x_trainer)
        distance = (y - y_rollout).abs().mean().item()
        print(f"{name}: output off by {distance:.2e} on average, gradient norm {gradient.norm():.1f}")


if __name__ == "__main__":
    main()
