"""The training state and the optimizer step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Shaped

from pallas_kernels.pytrees import register_arrays
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.sharding.axes import constrain
from trace_jax.sharding.mesh import mesh_of, replicated
from trace_jax.sharding.rules import constrain_params, shardings


@register_arrays
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes or needs.

    Args:
      params: float32 masters.
      opt_state: optax state.
      multipliers: static multipliers of activations and KV cache; constant for a run.
    """

    params: Params
    opt_state: optax.OptState
    multipliers: Multipliers


class PolicyVersion(NamedTuple):
    """Float32 masters after a number of updates."""

    params: Params
    version: int


def initial_state(params: Params, optimizer: optax.GradientTransformation, multipliers: Multipliers) -> TrainState:
    """The state before the first update.

    Its arrays are committed to their devices, as those of every later state are: jit takes the two for different programs and would
    compile the step twice. On a mesh the moments lie where their parameters do.
    """
    mesh = mesh_of(params)
    if mesh is not None:
        placed = shardings(jax.eval_shape(optimizer.init, params), mesh)
        return TrainState(params, jax.jit(optimizer.init, out_shardings=placed)(params), jax.device_put(multipliers, replicated(mesh)))
    opt_state = jax.jit(optimizer.init)(params)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), TrainState(params, opt_state, multipliers))


@functools.partial(jax.jit, donate_argnums=(0,))
def add_gradients(total: Params, part: Params) -> Params:
    """Sum of two gradients; the first one's buffers are reused."""
    return jax.tree.map(jnp.add, total, part)


@functools.partial(jax.jit, static_argnames=("optimizer",))
def apply_gradients(
    params: Params, opt_state: optax.OptState, gradient: Params, *, optimizer: optax.GradientTransformation
) -> tuple[Params, optax.OptState, Float[Array, ""]]:
    """One optimizer update; a gradient that is not finite leaves everything as it was.

    Returns:
      New parameters, new optimizer state, and the global norm of the gradient before clipping.
    """
    norm = optax.tree.norm(gradient)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer step count with floats
        updates, new_state = optimizer.update(gradient, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    finite = jnp.isfinite(norm)

    def keep(new: Shaped[Array, "*s"], old: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
        return jnp.where(finite, new, old)

    new_params, new_state = jax.tree.map(keep, new_params, params), jax.tree.map(keep, new_state, opt_state)
    return constrain_params(new_params), constrain_params(new_state), constrain(norm)
