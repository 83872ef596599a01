"""The routed experts of one layer in blocks of a few experts, rounded by the one quantizer.

A multiplier belongs to one expert, so a block of experts is rounded as the whole layer would be, in a fraction of the memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Quantized
from trace_jax.layers.experts import ExpertWeights
from trace_jax.models.policy import Policy
from trace_jax.quantization.plan import Format
from trace_jax.quantization.weights import fake_quant_experts, quantize_experts
from trace_jax.train.stored_policy import ParamSource

HostWeights = dict[str, np.ndarray]
"""`gate`, `up` and `down` of some experts."""

BLOCK_VALUES = 1 << 21
"""Most weights of a block, beyond one expert; temporary arrays take a few times 8 MiB."""


def expert_blocks(policy: Policy, params: ParamSource, layer: int) -> Iterator[tuple[int, HostWeights]]:
    """The float32 masters of one layer.

    Yields:
      number of the first expert of the block, and its weights as views of the layer's; all blocks have one size.
    """
    config = policy.config
    stack = next(stack for stack in config.stacks if layer in stack.layer_ids)
    place = (stack.layer_ids.index(layer),)
    whole = {name: params.read((*stack.path, "experts", name), place) for name in ExpertWeights._fields}
    size = block_size(config.num_experts, 3 * config.hidden_size * config.expert_hidden_size)
    for first in range(0, config.num_experts, size):
        yield first, {name: weights[first : first + size] for name, weights in whole.items()}


def block_size(num_experts: int, values: int) -> int:
    """Experts of a block: the most that divide `num_experts` and keep the block of `values` an expert small."""
    return max(size for size in range(1, num_experts + 1) if num_experts % size == 0 and (size == 1 or size * values <= BLOCK_VALUES))


def on_device(block: HostWeights) -> ExpertWeights:
    """A copy of a block for jax, which would keep what it shares with NumPy longer than anybody needs it."""
    return ExpertWeights(*(jnp.array(block[name]) for name in ExpertWeights._fields))


@functools.partial(jax.jit, static_argnames=("fmt",))
def quantized_block(masters: ExpertWeights, *, fmt: Format) -> dict[str, Quantized]:
    """`quantize_experts`, compiled."""
    return quantize_experts(masters, fmt)


@functools.partial(jax.jit, static_argnames=("fmt",))
def trainer_block(masters: ExpertWeights, *, fmt: Format) -> ExpertWeights:
    """`fake_quant_experts`, compiled: what the trainer computes with."""
    return fake_quant_experts(masters, fmt)
