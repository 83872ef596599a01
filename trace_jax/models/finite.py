"""Parameters without NaN and infinities, checked where they enter: after loading, and before calibration."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from trace_jax.errors import UserError
from trace_jax.models.registry import Params
from trace_jax.sharding.placement import to_host


def require_finite(params: Params, where: object) -> None:
    """Looks at every weight: a damaged head or last projection shows in no activation, so a forward pass would not tell.

    Args:
      params: of a policy.
      where: what they belong to, for the message.

    Raises:
      UserError: naming the first weight that holds a NaN or an infinity.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    finite = to_host(_all_finite([leaf for _, leaf in leaves]))
    for (path, _), good in zip(leaves, finite, strict=True):
        if not good:
            name = ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
            raise UserError(f"{where}: the weight {name} holds NaN or Inf; start from an undamaged checkpoint")


@jax.jit
def _all_finite(leaves: list[Float[Array, "*_"]]) -> list[Bool[Array, ""]]:
    return [jnp.all(jnp.isfinite(leaf)) for leaf in leaves]
