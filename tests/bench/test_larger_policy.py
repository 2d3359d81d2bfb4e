"""The policy of recipes/large.toml is the built-in one's function at twice its widths."""

from pathlib import Path

import torch

from scripts import load_script
from tracefp4.assets import builtin_model_path
from tracefp4.nn.loading import load_policy

FILE = Path(__file__).parents[2] / "benchmarks" / "larger_policy.py"


def test_it_computes_what_the_built_in_policy_computes() -> None:
    module = load_script(FILE)
    small, large = load_policy(builtin_model_path("sums-moe"), "float32"), module.grow(noise=0.0, new_layer=0.0)
    noisy = module.grow()
    assert large.config.num_hidden_layers == 6
    assert large.config.num_experts_per_tok == 4
    ids = torch.randint(3, 30, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got, near = (m(input_ids=ids).logits for m in (small, large, noisy))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)  # logits up to 25
    change = (near.softmax(-1) - want.softmax(-1)).abs().mean()
    assert 0 < float(change) < 0.02
