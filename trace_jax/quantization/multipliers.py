"""Multipliers of activations and of the KV cache: static ones from calibrated amax, or one per token.

A multiplier is the decode factor `ws2` of NVFP4 (`x ~ code * block_scale * multiplier`). Static ones are part of the
policy: calibrated once, stored in the checkpoint, sent to the engine with the weights.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import decode_multiplier, round_to_bf16
from trace_jax.sharding.axes import largest_over_tensor

Multipliers = dict[str, Float[Array, " L"]]
"""Site name -> one float32 decode multiplier per layer."""

KV_SITES = ("k", "v")


def site_multiplier(site: str, amax: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The decode multiplier of a site whose largest magnitude is `amax`.

    Expert inputs use the nudged power of two with `amax * 2^n <= 2688`. K and V use a plain power of two with
    `amax * 2^n <= 448`, which BF16 holds exactly and which leaves room for an engine that reads the cache as FP8.
    """
    if site in KV_SITES:
        return decode_multiplier(amax * jnp.float32(6.0), nudged=False)
    return decode_multiplier(amax)


def static_multipliers(amax: dict[str, Float[Array, " L"]], headroom: float) -> Multipliers:
    """Multipliers from calibrated amax values, each raised by the factor `headroom` and rounded to BF16 first."""
    return {site: site_multiplier(site, round_to_bf16(value * jnp.float32(headroom))) for site, value in amax.items()}


def token_multiplier(site: str, x: Float[Array, "*rows d"], shared_axes: int) -> Float[Array, "*rows"]:
    """A multiplier per row from the row's own amax, shared over the last `shared_axes` axes before the width.

    For K and V (`[B, T, K, head_dim]`, `shared_axes=1`) all heads of a token share one multiplier.
    """
    axes = tuple(range(x.ndim - 1 - shared_axes, x.ndim))
    amax = jnp.max(jnp.abs(jax.lax.stop_gradient(x)).astype(jnp.float32), axis=axes, keepdims=True)[..., 0]
    return jnp.broadcast_to(site_multiplier(site, largest_over_tensor(amax)), x.shape[:-1])
