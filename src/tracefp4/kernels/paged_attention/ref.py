"""Reference of attention over a paged cache, prefill chunks and decode alike.

Legend: B sequences, Q query tokens of each in this step, H query heads, G KV heads, D head_dim, T context.
Products and sums run in FP32 on operands that are exact in BF16, as a tensor core does; a quantized cache's
encode scale is applied to the FP32 scores and outputs (the epilogue), never folded into an operand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q_BQHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    q_positions_BQ: Tensor,
    scaling: float,
    k_epilogue: float = 1.0,
    v_epilogue: float = 1.0,
) -> Tensor:
    """Causal attention of new tokens over their sequences' gathered context; [B, Q, H, D] in q's dtype.

    k, v: context in order of position, f32 or the compute dtype; entries past a sequence's length are ignored
    because no query position reaches them, even where they hold NaN or Inf (slots keep what their last owner left).
    q_positions int64 [B, Q]: absolute position of every query; -1 marks padding, whose output is 0. Softmax in FP32;
    in BF16 the probabilities are rounded to BF16 before the second product, as fused attention kernels do.
    """
    B, Q, H, D = q_BQHD.shape
    T, G = k_BTGD.shape[1], k_BTGD.shape[2]
    q = q_BQHD.float().view(B, Q, G, H // G, D).permute(0, 2, 3, 1, 4)  # B G H/G Q D
    q = q.reshape(B, G, (H // G) * Q, D)
    scores = q @ k_BTGD.float().permute(0, 2, 3, 1)  # B G (H/G*Q) T
    scores = scores.mul_(scaling * k_epilogue).view(B, G, H // G, Q, T)
    hidden = torch.arange(T, device=q.device) > q_positions_BQ[..., None]  # B Q T; a padding row hides everything
    scores.masked_fill_(hidden[:, None, None], float("-inf"))
    p = torch.softmax(scores, dim=-1)
    p.masked_fill_((q_positions_BQ < 0)[:, None, None, :, None], 0.0)
    p = p.to(q_BQHD.dtype).float().view(B, G, (H // G) * Q, T)
    # A probability of 0 does not hide a NaN from the product.
    unreached = torch.arange(T, device=q.device) > q_positions_BQ.amax(-1, keepdim=True)  # B T
    v = v_BTGD.float().masked_fill(unreached[..., None, None], 0.0)
    out = (p @ v.permute(0, 2, 1, 3)).mul_(v_epilogue)  # B G (H/G*Q) D
    out = out.view(B, G, H // G, Q, D).permute(0, 3, 1, 2, 4).reshape(B, Q, H, D)
    return out.to(q_BQHD.dtype)
