"""The expert block: gated feed-forward networks of which each token uses k.

Two implementations of one function. `dense` multiplies every token with every expert as two plain matrix products and
folds the mixing weight into the second one's input; it wins while all experts of a layer are small. `ragged` sorts the
token copies by expert and uses grouped products; its cost follows k, not E. The two round differently, so rollout and
trainer must use the same one. On a mesh each device computes with its own experts (`expert_parallel.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import as_stored, grouped_matmul, keep_rounding
from trace_jax.layers import expert_parallel, partial_sums
from trace_jax.sharding.axes import in_mesh

DENSE_PARAMETERS_LIMIT = 1 << 20
"""Largest parameter count of one layer's experts for which `auto` takes the dense implementation."""


class ExpertWeights(NamedTuple):
    """Weights of one layer's experts, contraction axis last; it is longer where inputs carry their residual (`quantization.channels`)."""

    gate: Float[Array, "E F D"]
    up: Float[Array, "E F D"]
    down: Float[Array, "E D F"]


class ExpertBiases(NamedTuple):
    """What is added to the three products of one layer's experts, or of sorted rows."""

    gate: Float[Array, "E F"]
    up: Float[Array, "E F"]
    down: Float[Array, "E D"]


QuantizeHidden = Callable[[Float[Array, "*rows F"]], Float[Array, "*rows width"]]
Activation = Callable[[Float[Array, "*rows F"], Float[Array, "*rows F"]], Float[Array, "*rows F"]]
"""(gate, up) -> the hidden values, in their dtype."""


def choose_implementation(requested: str, num_experts: int, hidden_size: int, expert_hidden_size: int) -> str:
    """Resolves `auto` to `dense` or `ragged` from the size of one layer's experts."""
    if requested != "auto":
        return requested
    parameters = 3 * num_experts * hidden_size * expert_hidden_size
    return "dense" if parameters <= DENSE_PARAMETERS_LIMIT else "ragged"


def silu_gate(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
    """The usual gate, `silu(gate) * up`, computed in float32 and rounded once."""
    return keep_rounding((jax.nn.silu(as_stored(gate)) * as_stored(up)).astype(gate.dtype))


def clamped_gate(alpha: float, limit: float) -> Activation:
    """The gate of gpt-oss: `gate * sigmoid(alpha * gate) * (up + 1)`, its operands clamped (arXiv 2508.10925).

    Args:
      alpha: slope of the sigmoid.
      limit: largest gate, and largest magnitude of `up`.
    """

    def activation(gate: Float[Array, "*rows F"], up: Float[Array, "*rows F"]) -> Float[Array, "*rows F"]:
        clamped, linear = jnp.minimum(as_stored(gate), limit), jnp.clip(as_stored(up), -limit, limit)
        return keep_rounding((clamped * jax.nn.sigmoid(alpha * clamped) * (linear + 1.0)).astype(gate.dtype))

    return activation


def apply_experts(
    x: Float[Array, "N width"],
    ids: Int[Array, "N k"],
    mixing: Float[Array, "N k"],
    weights: ExpertWeights,
    quantize_hidden: QuantizeHidden,
    implementation: str,
    parts: int = 1,
    *,
    activation: Activation = silu_gate,
    biases: ExpertBiases | None = None,
) -> Float[Array, "N D"]:
    """Sums the k selected experts of every token, weighted.

    Args:
      x: expert input, already quantized where the plan says so, as wide as the gate's contraction axis.
      ids: expert ids, int32.
      mixing: weights of the selected experts, float32.
      weights: expert weights in the compute dtype.
      quantize_hidden: rounds the input of the down projection to the width of its contraction axis; blocks run along the last axis.
      implementation: `dense` or `ragged`.
      parts: devices between which the experts are thought to be divided, see `partial_sums`; divides their number. Only a rollout has
        more than one, and a mesh none.
      activation: makes the input of the down projection from the products with gate and up.
      biases: added to the products, in the compute dtype; None without.

    Returns:
      `[N, D]` in the dtype of `x`.
    """
    if not in_mesh():
        apply = {"dense": _dense, "ragged": _ragged}[implementation]
        return apply(x, ids, mixing, weights, quantize_hidden, parts, activation, biases)

    def added(x: Float[Array, "n width"], ids: Int[Array, "n k"], mixing: Float[Array, "n k"], parts: Any) -> Array:
        weights, biases = parts
        operands = _dense_operands(x, ids, mixing, weights, quantize_hidden, activation, biases)
        return jnp.matmul(*operands, preferred_element_type=jnp.float32)

    def products(rows: Float[Array, "m width"], group_sizes: Int[Array, " e"], parts: Any) -> Array:
        weights, biases = parts
        if biases is not None:  # behind the last group stand rows of no expert, whose results nobody reads
            ends, index = jnp.cumsum(group_sizes), jnp.arange(rows.shape[0], dtype=jnp.int32)
            expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), group_sizes.size - 1)
            gate, up, down = (bias[expert] for bias in biases)
            biases = ExpertBiases(gate, up, expert_parallel.once_over_tensor(down))
        return _sorted_products(rows, group_sizes, weights, quantize_hidden, activation, biases)

    if implementation == "dense":
        total = expert_parallel.gather_tokens(added, x, ids, mixing, (weights, biases))
        return total if biases is None else _with_down_bias(total, ids, mixing, biases)
    return expert_parallel.exchange_rows(products, x, ids, mixing, (weights, biases))


def _dense(
    x: Float[Array, "N width"],
    ids: Int[Array, "N k"],
    mixing: Float[Array, "N k"],
    weights: ExpertWeights,
    quantize_hidden: QuantizeHidden,
    parts: int,
    activation: Activation,
    biases: ExpertBiases | None,
) -> Float[Array, "N D"]:
    total = partial_sums.matmul(*_dense_operands(x, ids, mixing, weights, quantize_hidden, activation, biases), parts)
    return total if biases is None else _with_down_bias(total, ids, mixing, biases)


def _with_down_bias(
    total: Float[Array, "N D"], ids: Int[Array, "N k"], mixing: Float[Array, "N k"], biases: ExpertBiases
) -> Float[Array, "N D"]:
    weighted = jnp.sum(biases.down[ids].astype(jnp.float32) * mixing[:, :, None], axis=1)
    return keep_rounding((as_stored(total) + weighted).astype(total.dtype))


def _dense_operands(
    x: Float[Array, "N width"],
    ids: Int[Array, "N k"],
    mixing: Float[Array, "N k"],
    weights: ExpertWeights,
    quantize_hidden: QuantizeHidden,
    activation: Activation,
    biases: ExpertBiases | None = None,
) -> tuple[Float[Array, "N all_hidden"], Float[Array, "all_hidden D"]]:
    """Hidden values of all experts, with the mixing weights, and the down projections as one matrix; their product is the result."""
    num_experts, hidden, width = weights.gate.shape
    one_hot = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32)
    mixing_per_expert = jnp.sum(one_hot * mixing[:, :, None], axis=1)
    gate = x @ weights.gate.reshape(num_experts * hidden, width).T
    up = x @ weights.up.reshape(num_experts * hidden, width).T
    if biases is not None:
        gate, up = gate + biases.gate.reshape(1, -1), up + biases.up.reshape(1, -1)
    values = quantize_hidden(activation(gate, up).reshape(-1, num_experts, hidden))
    folded = keep_rounding((values.astype(jnp.float32) * mixing_per_expert[:, :, None]).astype(x.dtype))
    down = jnp.swapaxes(weights.down, 1, 2).reshape(-1, weights.down.shape[1])
    return folded.reshape(-1, down.shape[0]), down


def _ragged(
    x: Float[Array, "N width"],
    ids: Int[Array, "N k"],
    mixing: Float[Array, "N k"],
    weights: ExpertWeights,
    quantize_hidden: QuantizeHidden,
    parts: int,
    activation: Activation,
    biases: ExpertBiases | None,
) -> Float[Array, "N D"]:
    tokens, k = ids.shape
    num_experts = weights.gate.shape[0]
    flat_ids = ids.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    group_sizes = jnp.bincount(flat_ids, length=num_experts).astype(jnp.int32)
    of_rows = None if biases is None else ExpertBiases(*(bias[flat_ids[order]] for bias in biases))
    output = _sorted_products(x[order // k], group_sizes, weights, quantize_hidden, activation, of_rows)
    unsorted = jnp.zeros_like(output).at[order].set(output, unique_indices=True)
    weighted = unsorted.reshape(tokens, k, -1).astype(jnp.float32) * mixing[:, :, None]
    device = (ids // (num_experts // parts))[:, :, None]
    shares = [jnp.sum(jnp.where(device == part, weighted, 0.0), axis=1).astype(x.dtype) for part in range(parts)]
    return partial_sums.all_reduce(shares)


def _sorted_products(
    rows: Float[Array, "M width"],
    group_sizes: Int[Array, " E"],
    weights: ExpertWeights,
    quantize_hidden: QuantizeHidden,
    activation: Activation,
    biases: ExpertBiases | None = None,
) -> Float[Array, "M D"]:
    """Each row through its expert; the rows are sorted by expert, and the biases are those of the rows."""
    gate, up = grouped_matmul(rows, weights.gate, group_sizes), grouped_matmul(rows, weights.up, group_sizes)
    if biases is not None:
        gate, up = gate + biases.gate, up + biases.up
    output = grouped_matmul(quantize_hidden(activation(gate, up)), weights.down, group_sizes)
    return output if biases is None else keep_rounding(output + biases.down)
