"""Linear attention by the gated delta rule, and the short causal convolution before it, over sequences that may share a row.

A row's state starts anew wherever a position is 0, so packed sequences do not see each other, and a token that does not count leaves it
as it is, so padding behind a prompt does not enter it.

Source: Yang et al., Gated Delta Networks, arXiv 2412.06464.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import as_stored, keep_rounding


def causal_convolution(
    x: Float[Array, "B T C"], weight: Float[Array, "C taps"], earlier: Float[Array, "B before C"], positions: Int[Array, "B T"]
) -> Float[Array, "B T C"]:
    """Each channel mixed with its own last values, then SiLU, in float32 and rounded once to the dtype of `x`.

    Args:
      weight: of the `taps` last tokens, the newest last; float32.
      earlier: the inputs before the first token, `taps - 1` of them.
      positions: within the sequence; tokens before position 0 do not count.
    """
    taps, length = weight.shape[-1], x.shape[1]
    known = as_stored(jnp.concatenate([earlier, x], axis=1))
    total = jnp.zeros(x.shape, jnp.float32)
    for back in range(taps):
        first = taps - 1 - back
        there = (positions >= back)[..., None]
        total += jnp.where(there, known[:, first : first + length], 0.0) * weight[:, taps - 1 - back][None, None]
    return keep_rounding(jax.nn.silu(total).astype(x.dtype))


def last_inputs(x: Float[Array, "B T C"], earlier: Float[Array, "B before C"], counting: Bool[Array, "B T"]) -> Float[Array, "B before C"]:
    """The newest inputs of each row, for the next tokens' convolution; those that count come first in a row."""
    known = jnp.concatenate([earlier, x], axis=1)
    newest = jnp.sum(counting, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(earlier.shape[1], dtype=jnp.int32)[None]
    return jnp.take_along_axis(known, newest[..., None], axis=1)


def gated_delta_rule(
    query: Float[Array, "B T H k"],
    key: Float[Array, "B T H k"],
    value: Float[Array, "B T H v"],
    decay: Float[Array, "B T H"],
    strength: Float[Array, "B T H"],
    state: Float[Array, "B H k v"],
    positions: Int[Array, "B T"],
    counting: Bool[Array, "B T"],
) -> tuple[Float[Array, "B T H v"], Float[Array, "B H k v"]]:
    """Token by token: the state fades, what it holds under the key moves towards the value, and the query reads it; all in float32.

    Args:
      query, key: of length 1, the query times `k**-0.5`.
      decay: logarithm of the factor by which the state fades, at most 0.
      strength: how far it moves, 0 to 1.
      state: before the first token.
      positions: the state is zero before a token at position 0.
      counting: tokens that change the state.

    Returns:
      What each query reads, and the state after the last token.
    """
    decay = jnp.where(counting[..., None], decay, 0.0)
    strength = jnp.where(counting[..., None], strength, 0.0)

    def step(
        state: Float[Array, "B H k v"], token: tuple[Array, Array, Array, Array, Array, Array]
    ) -> tuple[Float[Array, "B H k v"], Float[Array, "B H v"]]:
        query, key, value, decay, strength, first = token
        state = jnp.where(first[:, None, None, None], 0.0, state) * jnp.exp(decay)[..., None, None]
        held = jnp.sum(state * key[..., None], axis=-2)
        state = state + key[..., None] * ((value - held) * strength[..., None])[..., None, :]
        return state, jnp.sum(state * query[..., None], axis=-2)

    tokens = (query, key, value, decay, strength, (positions == 0) & counting)
    state, read = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens))
    return jnp.moveaxis(read, 0, 1), state


def unit_length(x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    """Vectors of length 1 along the last axis, float32."""
    x = as_stored(x)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
