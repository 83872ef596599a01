"""Log-probabilities and entropy from logits, in float32 and at the sampling temperature."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


def token_logprobs(logits: Float[Array, "B T V"], tokens: Int32[Array, "B T"], temperature: Float32[Array, " B"]) -> Float32[Array, "B T"]:
    """log p(tokens[b, t] | tokens[b, :t]), aligned with ``tokens``.

    The logits at t - 1 predict token t. Nothing precedes the first token, so its entry is 0 by definition and must not
    be masked in. The temperature belongs to the batch and is the one the rollout sampled with; it must be positive.

    Args:
        logits: [B, T, V], any float dtype; position t sees tokens up to and including t.
        tokens: int32[B, T].
        temperature: f32[B].

    Returns:
        f32[B, T].
    """
    scaled = logits[:, :-1].astype(jnp.float32) / temperature[:, None, None]
    chosen = jnp.take_along_axis(scaled, tokens[:, 1:, None], axis=-1)[..., 0]
    logp = chosen - jax.nn.logsumexp(scaled, axis=-1)
    return jnp.pad(logp, ((0, 0), (1, 0)))


def entropy_from_logits(logits: Float[Array, "*batch V"]) -> Float32[Array, "*batch"]:
    """Entropy in nats of softmax(logits) over the last axis; a logit of -inf is a token that cannot be drawn.

    Divide the logits by the temperature first to get the entropy of the sampling distribution.
    """
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    possible = logp > -jnp.inf
    # The inner where keeps 0 * inf out of the gradient as well.
    safe = jnp.where(possible, logp, 0.0)
    return -jnp.sum(jnp.where(possible, jnp.exp(safe) * safe, 0.0), axis=-1)
