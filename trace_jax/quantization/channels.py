"""Residual compensation (QUADS, arXiv 2607.15810): channels of an expert input whose rounding error is rounded and multiplied too.

    Y = Q(X) Q(W)^T + Q(R[:, C]) Q(W)[:, C]^T,   R = X - Q(X)

It is one product with longer rows: [Q(X), Q(R[:, C])] times [Q(W), Q(W)[:, C]]^T. The channels are chosen once
(`calibration.choose_channels`) and kept: a choice that followed the batch would make a token's output depend on its neighbours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64, Int, Int32

from pallas_kernels import block_format
from pallas_kernels.residual_fake_quant.rule import residual
from trace_jax.models.decoder_config import Stack
from trace_jax.quantization.plan import QuantPlan

Channels: TypeAlias = Mapping[str, Int[Array | np.ndarray, "L _"]]
"""Site -> the compensated channels of each layer, ascending, int32; empty where nothing is compensated."""

SITE_OF = {"gate": "expert_input", "up": "expert_input", "down": "down_input"}
"""Expert weight -> the site that it multiplies."""


def channel_counts(sizes: Mapping[str, int], plan: QuantPlan, fraction: float) -> dict[str, int]:
    """How many channels of each site a share stands for, rounded up to whole blocks; nothing for a share of zero.

    Args:
      sizes: width of each compensated site.
      plan: of the rollout; its inputs of the experts are in a block format.
      fraction: 0 to 1.
    """
    if fraction == 0:
        return {}
    blocks = {site: block_format(plan.site(site).format).block for site in sizes}
    share = Fraction(str(fraction))  # 0.07 as it is written: the nearest float times 1600 is a little more than 112
    return {site: min(size, math.ceil(share * size / blocks[site]) * blocks[site]) for site, size in sizes.items()}


def channel_energy(x: Float[Array, "*rows d"], rounded: Float[Array, "*rows d"]) -> Float[Array, " d"]:
    """Sum over all rows of the squared residual, in float32: added up over calibration sequences, it ranks the channels."""
    return jnp.sum(jnp.square(residual(x, rounded).astype(jnp.float32)), axis=tuple(range(x.ndim - 1)))


def largest_channels(energy: Float64[np.ndarray, "L d"], count: int) -> Int32[np.ndarray, "L c"]:
    """The `count` channels of each layer with the largest energy, ascending; of equal ones the first."""
    order = np.argsort(-energy, axis=-1, kind="stable")
    return np.sort(order[:, :count], axis=-1).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("stacks",))
def with_channel_columns(params: dict[str, Any], channels: Channels, *, stacks: tuple[Stack, ...]) -> dict[str, Any]:
    """Parameters whose experts have the columns of the compensated channels once more, behind the others, layer by layer.

    Args:
      stacks: the model's stacked layers, which say which layer a weight belongs to.
    """
    layer_ids = {stack.path[1:]: stack.layer_ids for stack in stacks}

    def longer(weight: Float[Array, "L E out width"], ids: Int[Array | np.ndarray, "L c"]) -> Float[Array, "L E out longer"]:
        columns = jax.vmap(lambda layer, chosen: jnp.take(layer, chosen, axis=-1))(weight, ids)
        return jnp.concatenate([weight, columns], axis=-1)

    def extended(tree: dict[Any, Any], path: tuple[str | int, ...]) -> dict[Any, Any]:
        if "experts" in tree:
            ids = {site: jnp.asarray(chosen)[np.asarray(layer_ids[path])] for site, chosen in channels.items()}
            return tree | {"experts": {name: longer(w, ids[SITE_OF[name]]) for name, w in tree["experts"].items()}}
        return {key: extended(value, (*path, key)) if isinstance(value, dict) else value for key, value in tree.items()}

    return params | {"groups": extended(params["groups"], ())}
