"""Log-probabilities and entropy of a vocabulary distribution, in slices so that the logits never exist as a whole."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

LOGITS_LIMIT = 1 << 24
"""Largest number of logits held at once; beyond it the time axis is processed in slices."""


def logits_of(hidden: Float[Array, "*rows D"], head: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Logits in float32 from hidden states; the head is used in the dtype of `hidden`."""
    return jnp.matmul(hidden, head.astype(hidden.dtype).T, preferred_element_type=jnp.float32)


def entropy_of(logp: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Entropy in nats of normalised log-probabilities; -inf is a token that cannot be drawn and adds nothing."""
    possible = logp > -jnp.inf
    # The inner where keeps 0 * inf out of the gradient as well.
    safe = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(safe) * safe, 0.0), axis=-1)


def token_logprobs(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], targets: Int[Array, "B T"], temperature: Float[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probability of `targets[:, t]` given `hidden[:, t]`, and the entropy of that distribution.

    Args:
      temperature: the logits are divided by the temperature of their target first; 0 (greedy) counts as 1.

    Returns:
      `(logp, entropy)` in float32, nats.
    """
    batch, length, _ = hidden.shape
    divisor = jnp.where(temperature > 0, temperature, 1.0)

    def of_slice(
        hidden: Float[Array, "B S D"], targets: Int[Array, "B S"], divisor: Float[Array, "B S"]
    ) -> tuple[Float[Array, "B S"], Float[Array, "B S"]]:
        logp = jax.nn.log_softmax(logits_of(hidden, head) / divisor[..., None], axis=-1)
        chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        return chosen, entropy_of(logp)

    width = max(1, LOGITS_LIMIT // (batch * head.shape[0]))
    if width >= length:
        return of_slice(hidden, targets, divisor)
    slices = -(-length // width)
    padding = slices * width - length

    def split(x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "slices B S *rest"]:
        padded = jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        return jnp.moveaxis(padded.reshape(batch, slices, width, *x.shape[2:]), 1, 0)

    step = jax.checkpoint(lambda _, xs: (None, of_slice(*xs)))
    _, (logp, entropy) = jax.lax.scan(step, None, (split(hidden), split(targets), split(divisor)))

    def merge(x: Float[Array, "slices B S"]) -> Float[Array, "B T"]:
        return jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]

    return merge(logp), merge(entropy)
