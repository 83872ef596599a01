"""The expert block with FP4 operands, in the order of operations of the trainer's ragged implementation."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from rollout_bridge.vllm_plugin.activations import Rounding
from rollout_bridge.vllm_plugin.numerics import Quantized, dequantize

UNROUNDED = Rounding()


def apply_experts(
    x: Tensor,
    ids: Tensor,
    mixing: Tensor,
    gate_up: Quantized,
    down: Quantized,
    expert_input: Rounding = UNROUNDED,
    down_input: Rounding = UNROUNDED,
) -> Tensor:
    """Sums the k selected experts of every token, weighted.

    Products have operands dequantized to the dtype of x and float32 accumulation. The expert input is rounded once for a token,
    whatever experts it goes to; the input of the down projection is rounded for each of them.

    Args:
      x: expert input, [N, D].
      ids: expert ids, integers [N, k].
      mixing: weights of the selected experts, float32 [N, k].
      gate_up: [E, 2F, D], the gate's rows first, one multiplier per expert ([E, 1]).
      down: [E, D, F], one multiplier per expert ([E, 1]).
      expert_input: rounding of x; by default W4A16.
      down_input: the same of the down projection's input.

    Returns:
      [N, D] in the dtype of x.
    """
    rows = expert_input.input(x)
    outputs = torch.zeros(*ids.shape, x.shape[-1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        weight = expert_input.weight(dequantize(_expert(gate_up, expert), x.dtype))
        gate, up = (rows[token] @ weight.T).chunk(2, dim=-1)
        hidden = (silu(gate.to(torch.float32)) * up.to(torch.float32)).to(x.dtype)
        output = down_input.input(hidden) @ down_input.weight(dequantize(_expert(down, expert), x.dtype)).T
        outputs[token, place] = output.to(torch.float32) * mixing[token, place, None].to(torch.float32)
    return outputs.sum(dim=1).to(x.dtype)


def _expert(weights: Quantized, index: int) -> Quantized:
    multiplier = None if weights.multiplier is None else weights.multiplier[index]
    return Quantized(weights.codes[index], weights.scales[index], multiplier, weights.size, weights.fmt)
