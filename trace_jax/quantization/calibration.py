"""Calibration of the static multipliers on real sequences.

Run once after the cold start or the import; the result is stored with the checkpoint and stays constant for a run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32

from trace_jax.errors import UserError
from trace_jax.layers.attention import causal_mask
from trace_jax.models.finite import require_finite
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.multipliers import Multipliers, static_multipliers
from trace_jax.quantization.plan import UNQUANTIZED

ROWS = 16
"""Sequences per forward pass."""


def calibrate(policy: Policy, params: Params, sequences: Sequence[Sequence[int]], headroom: float) -> Multipliers:
    """Static multipliers of every site and layer, from the unquantized forward over some sequences.

    Args:
      params: float32 masters.
      sequences: token ids of prompts with their answers; padding never counts.
      headroom: factor on the largest magnitude seen, at least 1.

    Raises:
      UserError: there is no token, or a weight or a magnitude is not finite.
    """
    sequences = [tokens for tokens in sequences if len(tokens)]
    if not sequences:
        raise UserError("calibration has no prompts; raise calibration.prompts or give the task more rows")
    require_finite(params, "calibration")
    amax: dict[str, np.ndarray] = {}
    for batch in _equal_length_batches(sequences):
        for site, value in jax.device_get(_amax(params, jnp.asarray(batch), policy=policy)).items():
            amax[site] = np.maximum(amax.get(site, 0.0), value)
    for site, value in amax.items():
        if not np.all(np.isfinite(value)):
            layer = int(np.flatnonzero(~np.isfinite(value))[0])
            raise UserError(
                f"layer {layer} produces values that are not finite at {site}; the checkpoint's weights are damaged (NaN or Inf)"
            )
    return static_multipliers({site: jnp.asarray(value, jnp.float32) for site, value in amax.items()}, headroom)


def _equal_length_batches(sequences: Sequence[Sequence[int]]) -> list[Int32[np.ndarray, "rows width"]]:
    """Stacks windows of equal width, so that no pad token enters the statistics.

    The width is the largest power of two that a sequence holds; a first and a last window cover it whole.
    """
    by_width: dict[int, list[Sequence[int]]] = {}
    for tokens in sequences:
        width = 1 << (len(tokens).bit_length() - 1)
        by_width.setdefault(width, []).append(tokens[:width])
        if len(tokens) > width:
            by_width[width].append(tokens[-width:])
    batches = []
    for width, rows in sorted(by_width.items()):
        for start in range(0, len(rows), ROWS):
            part = rows[start : start + ROWS]
            part = list(part) + [part[0]] * (ROWS - len(part))
            batches.append(np.asarray(part, np.int32).reshape(ROWS, width))
    return batches


@functools.partial(jax.jit, static_argnames=("policy",))
def _amax(params: Params, tokens: Int[Array, "B T"], *, policy: Policy) -> dict[str, Float[Array, " L"]]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    inputs = ForwardInputs(tokens, positions, causal_mask(positions, jnp.ones_like(tokens)), {})
    return policy.forward(params, inputs, policy.options(UNQUANTIZED, observe="amax")).observed
