"""The decoder that Llama and dense Qwen3 share: grouped-query attention and one gated feed-forward network a layer."""

from __future__ import annotations

from collections.abc import Iterator

from flax import nnx
from jaxtyping import Array, Float

from trace_jax.layers.rope import Tables
from trace_jax.models.blocks import feed_forward, normed, self_attention
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.decoder_config import DecoderConfig
from trace_jax.models.key_map import Entry, LayerTensor, attention_tensors, decoder_entries, layer_norm_tensors, mlp_tensors
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Attention, Decoder, Mlp, norm


class Layer(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, hidden: int, rngs: nnx.Rngs, *, norms: tuple[int, int] | None, biases: str):
        self.input_norm = norm(config, config.hidden_size)
        self.attention = Attention(config, rngs, norms=norms, biases=biases)
        self.post_attention_norm = norm(config, config.hidden_size)
        self.mlp = Mlp(config, hidden, rngs)


def make_decoder(config: DecoderConfig, hidden: int, rngs: nnx.Rngs, *, norms: tuple[int, int] | None = None, biases: str = "") -> Decoder:
    """The decoder with random parameters.

    Args:
      hidden: width of the feed-forward networks.
      norms, biases: as in `Attention`.
    """
    return Decoder(config, rngs, lambda kind, keys: Layer(config, hidden, keys, norms=norms, biases=biases))


def layer_function(config: DecoderConfig, turns: Tables) -> ApplyLayer:
    """The function of a layer; `turns` are the rotary tables of the tokens."""
    eps = config.rms_norm_eps

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        x = x + self_attention(layer.attention, config, normed(x, layer.input_norm, eps), scope, turns)
        return x + feed_forward(layer.mlp, normed(x, layer.post_attention_norm, eps), scope.options.partial_sums)

    return apply_layer


def key_map(config: DecoderConfig, hidden: int, *, norms: tuple[int, int] | None = None, biases: str = "") -> list[Entry]:
    """Every tensor of a checkpoint; arguments as in `make_decoder`."""

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        yield from attention_tensors(config, norms, biases)
        yield from layer_norm_tensors(config)
        yield from mlp_tensors(config, hidden)

    return decoder_entries(config, of_layer)
