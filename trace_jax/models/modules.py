"""Parameters of decoder layers as Flax NNX modules, for every family to build its layers from.

They hold float32 masters in the torch layout `[out, in]`, so that the contraction axis is last and the quantization blocks run along it.
The names of the attributes are the paths of the parameters: checkpoints, sharding rules and key maps know them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from trace_jax.layers.experts import ExpertWeights
from trace_jax.models.decoder_config import DecoderConfig, LayerGroup


class Attention(nnx.Module):
    """Projections of grouped-query attention, with norms and biases where the family has them.

    Args:
      norms: lengths of the norms of queries and keys: of one head, or of all together; None without them.
      biases: letters of the projections that have a bias, of `qkvo`.
      sinks: whether every query head has a logit of its own that no value belongs to.
      gated: whether each head's query has a gate behind it, by whose sigmoid what the head attended to is multiplied.
    """

    o_bias: nnx.Param
    sinks: nnx.Param

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        norms: tuple[int, int] | None = None,
        biases: str = "",
        sinks: bool = False,
        gated: bool = False,
    ):
        width, head = config.hidden_size, config.head_dim
        rows = {"q": config.num_heads * head, "k": config.num_kv_heads * head, "v": config.num_kv_heads * head, "o": width}
        self.q_proj = linear(rngs, rows["q"] * (1 + gated), width)
        self.k_proj = linear(rngs, rows["k"], width)
        self.v_proj = linear(rngs, rows["v"], width)
        self.o_proj = linear(rngs, width, rows["q"], gain=output_gain(config))
        if norms is not None:
            self.q_norm, self.k_norm = norm(config, norms[0]), norm(config, norms[1])
        for letter in biases:
            setattr(self, f"{letter}_bias", zeros(rows[letter]))
        if sinks:
            self.sinks = zeros(config.num_heads)


class Experts(nnx.Module):
    """Weights of one layer's routed experts: `gate`, `up` `[E, F, D]` and `down` `[E, D, F]`."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        count, hidden, width = config.num_experts, config.expert_hidden_size, config.hidden_size
        self.gate = linear(rngs, count, hidden, width)
        self.up = linear(rngs, count, hidden, width)
        self.down = linear(rngs, count, width, hidden, gain=output_gain(config))

    def weights(self) -> ExpertWeights:
        """The masters as a tuple."""
        return ExpertWeights(self.gate[...], self.up[...], self.down[...])


class Mlp(nnx.Module):
    """A gated feed-forward network that every token uses: `gate`, `up` `[F, D]` and `down` `[D, F]`."""

    def __init__(self, config: DecoderConfig, hidden_size: int, rngs: nnx.Rngs):
        self.gate = linear(rngs, hidden_size, config.hidden_size)
        self.up = linear(rngs, hidden_size, config.hidden_size)
        self.down = linear(rngs, config.hidden_size, hidden_size, gain=output_gain(config))


class Table(nnx.Module):
    """A `[V, D]` matrix: the embedding or the output head."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (config.vocab_size, config.hidden_size), jnp.float32))


class Decoder(nnx.Module):
    """Embedding, groups of stacked layers, last norm and head.

    Args:
      make_layer: one layer of a kind.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, make_layer: Callable[[str, nnx.Rngs], nnx.Module]):
        def stack(kind: str, group: LayerGroup) -> nnx.Module:
            made = nnx.vmap(lambda keys: make_layer(kind, keys), in_axes=0, out_axes=0)
            return made(rngs.split(group.count))

        self.embed = Table(config, rngs)
        self.groups = nnx.List([])
        for group in config.groups:
            stacks = [stack(kind, group) for kind in group.kinds]
            self.groups.append(stacks[0] if len(stacks) == 1 else nnx.List(stacks))
        self.final_norm = norm(config, config.hidden_size)
        if not config.tie_embeddings:
            self.lm_head = Table(config, rngs)


def linear(rngs: nnx.Rngs, *shape: int, gain: float = 1.0) -> nnx.Param:
    """A random matrix, or a stack of them, whose products keep the magnitude of their input times `gain`."""
    deviation = gain * shape[-1] ** -0.5
    return nnx.Param(deviation * jax.random.normal(rngs.params(), shape, jnp.float32))


def norm(config: DecoderConfig, size: int) -> nnx.Param:
    """The weight of a norm that leaves magnitudes as they are."""
    return nnx.Param(jnp.full(size, 1.0 - config.NORM_OFFSET, jnp.float32))


def zeros(*shape: int) -> nnx.Param:
    """A bias."""
    return nnx.Param(jnp.zeros(shape, jnp.float32))


def output_gain(config: DecoderConfig) -> float:
    """Gain of what adds to the residual stream, so that its magnitude does not grow with the depth."""
    return (2 * config.num_layers) ** -0.5
