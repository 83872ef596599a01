"""The expert block with FP4 operands, in the order of operations of the trainer's ragged implementation."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from rollout_bridge.vllm_plugin.numerics import NVFP4, Quantized, dequantize, fake_quant


def apply_experts(
    x: Tensor,
    ids: Tensor,
    mixing: Tensor,
    gate_up: Quantized,
    down: Quantized,
    input_multiplier: Tensor | None,
    hidden_multiplier: Tensor | None,
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
      input_multiplier: float32 scalar of the expert input; None leaves it as it is (W4A16).
      hidden_multiplier: the same of the down projection's input.

    Returns:
      [N, D] in the dtype of x.
    """
    if input_multiplier is not None:
        x = fake_quant(x, NVFP4, input_multiplier)
    outputs = torch.zeros(*ids.shape, x.shape[-1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, place = torch.where(ids == expert)
        gate, up = (x[token] @ dequantize(_expert(gate_up, expert), x.dtype).T).chunk(2, dim=-1)
        hidden = (silu(gate.to(torch.float32)) * up.to(torch.float32)).to(x.dtype)
        if hidden_multiplier is not None:
            hidden = fake_quant(hidden, NVFP4, hidden_multiplier)
        output = hidden @ dequantize(_expert(down, expert), x.dtype).T
        outputs[token, place] = output.to(torch.float32) * mixing[token, place, None].to(torch.float32)
    return outputs.sum(dim=1).to(x.dtype)


def _expert(weights: Quantized, index: int) -> Quantized:
    multiplier = None if weights.multiplier is None else weights.multiplier[index]
    return Quantized(weights.codes[index], weights.scales[index], multiplier, weights.size, weights.fmt)
