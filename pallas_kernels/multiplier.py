"""The float32 multiplier above the block scales of NVFP4: a power of two, nudged for weights and activations.

The multiplier is a *decode* multiplier: value = code * block scale * multiplier (ModelOpt's `weight_scale_2`).
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from pallas_kernels.arithmetic import bits_float, magnitude_bits, multiplier_bits
from pallas_kernels.formats import BlockFormat
from pallas_kernels.rounding import as_stored


def decode_multiplier(amax: Float[ArrayLike, "*s"], *, nudged: bool = True) -> Float[Array, "*s"]:
    """2^-n for a tensor with the given largest magnitude, n the largest integer with amax * 2^n <= 2688.

    Args:
      amax: float32 (or bfloat16), any shape.
      nudged: times (1 + 2^-17), which turns the ties of foreign quantizers into the same answer as ours. False for K and V,
        whose multipliers an engine keeps in bfloat16.

    Returns:
      float32 of the same shape. An amax of zero or one that is not finite gives n = 0.
    """
    amax = jnp.asarray(amax).astype(jnp.float32)
    return bits_float(multiplier_bits(magnitude_bits(amax), nudged))


def tensor_multiplier(x: Float[Array, "*s"]) -> Float[Array, ""]:
    """The nudged multiplier of a whole tensor. One value that is not finite gives n = 0."""
    bits = magnitude_bits(as_stored(x))
    return jax.lax.stop_gradient(bits_float(multiplier_bits(jnp.max(bits, initial=0), True)))


def resolve_multiplier(
    x: Float[Array, "*rows d"], fmt: BlockFormat, multiplier: Float[ArrayLike, "*#rows"] | None
) -> Float[Array, "*#rows"] | None:
    """The multiplier a quantizer uses for x: float32, scalar or with one axis for every leading axis of x.

    Raises ValueError for a multiplier the format does not have, or one that cannot be broadcast against the rows.
    """
    if not fmt.has_multiplier:
        if multiplier is not None:
            raise ValueError(f"{fmt.name} has no multiplier; pass multiplier=None")
        return None
    if multiplier is None:
        return tensor_multiplier(x)
    return align_multiplier(multiplier, x.shape[:-1])


def require_multiplier(fmt: BlockFormat, multiplier: Float[ArrayLike, "*m"] | None) -> None:
    """Raises ValueError if a format's multiplier is missing, for ops whose tensor is not in memory to take one from."""
    if fmt.has_multiplier and multiplier is None:
        raise ValueError(f"{fmt.name} needs a multiplier before the values exist; pass multiplier=, e.g. the calibrated one")


def align_multiplier(multiplier: Float[ArrayLike, "*m"], rows: tuple[int, ...]) -> Float[Array, "*aligned"]:
    """A multiplier as float32 with one axis for every axis of `rows` (a scalar stays a scalar)."""
    result = jnp.asarray(multiplier).astype(jnp.float32)
    if result.ndim == 0:
        return result
    shape = (1,) * (len(rows) - result.ndim) + result.shape
    if len(shape) != len(rows) or any(have not in (1, want) for have, want in zip(shape, rows, strict=True)):
        raise ValueError(f"multiplier of shape {result.shape} does not broadcast against the rows {rows} (all axes but the last)")
    return result.reshape(shape)
