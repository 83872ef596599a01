"""From a tensor to its blocks and back: the last axis is padded with zeros to whole blocks."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from pallas_kernels.formats import BlockFormat
from pallas_kernels.rounding import as_stored

_FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)


def check_input(x: Shaped[Array, "..."]) -> None:
    """Raises ValueError unless x is a bfloat16, float16 or float32 array with a last axis."""
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"cannot quantize an array of shape {x.shape}; the last axis is the contraction axis and must not be empty")
    if x.dtype not in _FLOATS:
        raise ValueError(f"cannot quantize {x.dtype}; pass bfloat16, float16 or float32")


def pad_last(x: Shaped[Array, "*rows d"], size: int) -> Shaped[Array, "*rows size"]:
    """x with zeros appended to the last axis up to `size`."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


def split_blocks(x: Float[Array, "*rows d"], fmt: BlockFormat) -> Float[Array, "*rows blocks block"]:
    """x in float32, cut into whole blocks."""
    count = fmt.scales_bytes(x.shape[-1])
    return pad_last(as_stored(x), count * fmt.block).reshape((*x.shape[:-1], count, fmt.block))


def join_blocks(blocks: Shaped[Array, "*rows blocks block"], size: int) -> Shaped[Array, "*rows d"]:
    """The first `size` values of every row of blocks."""
    return blocks.reshape((*blocks.shape[:-2], blocks.shape[-2] * blocks.shape[-1]))[..., :size]


def per_block(value: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows 1 1"] | Shaped[Array, ""]:
    """A row value with the two axes of `split_blocks` appended; scalars stay scalars."""
    return value if value.ndim == 0 else value[..., None, None]
