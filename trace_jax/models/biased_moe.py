"""What GLM-4.5 and DeepSeek-V3 share: dense first layers, then experts behind a biased sigmoid router with shared experts beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from trace_jax.errors import UserError
from trace_jax.layers.router import route_by_biased_sigmoid
from trace_jax.models.blocks import Choice, feed_forward, normed, routed_experts, router_logits
from trace_jax.models.decoder import ApplyLayer
from trace_jax.models.decoder_config import DENSE, LayerGroup, MoeConfig, dense_first
from trace_jax.models.hf_config import agreeing
from trace_jax.models.key_map import Entry, LayerTensor, decoder_entries, expert_tensors, layer_norm_tensors, mlp_tensors
from trace_jax.models.layer_scope import LayerScope
from trace_jax.models.modules import Experts, Mlp, linear, norm, zeros

Attend = Callable[[Any, Float[Array, "B T D"], LayerScope], Float[Array, "B T D"]]
"""(attention module, normed input, scope) -> what is added to the residual stream."""

REQUIRED_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_hidden_size",
    "intermediate_size": "dense_hidden_size",
    "first_k_dense_replace": "dense_layers",
    "n_shared_experts": "shared_experts",
    "n_group": "expert_groups",
    "topk_group": "kept_groups",
}
"""Keys of config.json and the config fields they fill, for `ConfigKeys`."""

OPTIONAL_KEYS = {"norm_topk_prob": ("norm_topk_prob", True), "tie_word_embeddings": ("tie_embeddings", False)}

EXPERT_SPELLINGS = ("n_routed_experts", "num_local_experts", "num_experts")
IRRELEVANT_KEYS = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})
"""How many layers that predict further tokens the files hold behind the others; the logits do not depend on them."""


@dataclass(frozen=True, kw_only=True)
class BiasedMoeConfig(MoeConfig):
    """Hyper-parameters of such a decoder beside those that every family has.

    Args:
      dense_layers: how many first layers have one feed-forward network instead of experts.
      dense_hidden_size: hidden width of that network.
      shared_experts: how many experts every token uses beside the routed ones.
      expert_groups, kept_groups: as `groups` and `kept_groups` of the router.
      routed_scaling: factor of the mixing weights.
      norm_topk_prob: whether the k selected scores are rescaled to sum to one.

    Raises:
      UserError: also if no layer has experts, or the groups do not divide or hold too few experts.
    """

    dense_layers: int = field(metadata={"least": 0})
    dense_hidden_size: int
    shared_experts: int = 1
    expert_groups: int = 1
    kept_groups: int = 1
    routed_scaling: float = 1.0
    norm_topk_prob: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_layers >= self.num_layers:
            raise UserError(f"model.config.dense_layers={self.dense_layers} leaves none of the {self.num_layers} layers with experts")
        if self.num_experts % self.expert_groups or self.kept_groups > self.expert_groups:
            raise UserError(
                f"model.config.expert_groups={self.expert_groups} must divide num_experts={self.num_experts}, "
                f"and be at least kept_groups={self.kept_groups}"
            )
        size = self.num_experts // self.expert_groups
        if self.expert_groups > 1 and (size < 2 or size * self.kept_groups < self.experts_per_token):
            raise UserError(f"model.config: {self.kept_groups} groups of {size} experts are too few for {self.experts_per_token} a token")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Dense layers, then layers with experts."""
        return dense_first(self, self.dense_layers)

    @property
    def shared_hidden_size(self) -> int:
        """Hidden width of all shared experts together."""
        return self.shared_experts * self.expert_hidden_size


class Layer(nnx.Module):
    """One decoder layer around a family's attention."""

    def __init__(self, kind: str, config: BiasedMoeConfig, rngs: nnx.Rngs, attention: nnx.Module):
        self.input_norm = norm(config, config.hidden_size)
        self.attention = attention
        self.post_attention_norm = norm(config, config.hidden_size)
        if kind == DENSE:
            self.mlp = Mlp(config, config.dense_hidden_size, rngs)
        else:
            self.router = linear(rngs, config.num_experts, config.hidden_size)
            self.router_correction = zeros(config.num_experts)
            self.experts = Experts(config, rngs)
            self.shared_experts = Mlp(config, config.shared_hidden_size, rngs)


def layer_function(config: BiasedMoeConfig, attend: Attend) -> ApplyLayer:
    """The function of a layer with a family's attention."""
    eps = config.rms_norm_eps

    def apply_layer(layer: Layer, kind: str, x: Float[Array, "B T D"], scope: LayerScope) -> Float[Array, "B T D"]:
        x = x + attend(layer.attention, normed(x, layer.input_norm, eps), scope)
        y = normed(x, layer.post_attention_norm, eps)
        if kind == DENSE:
            return x + feed_forward(layer.mlp, y, scope.options.partial_sums)

        def choose(y: Float[Array, "B T D"]) -> Choice:
            return route_by_biased_sigmoid(
                router_logits(y, layer.router),
                layer.router_correction[...],
                config.experts_per_token,
                groups=config.expert_groups,
                kept_groups=config.kept_groups,
                norm_topk_prob=config.norm_topk_prob,
                scale=config.routed_scaling,
                replay=scope.replay,
            )

        return x + (routed_experts(layer.experts, y, scope, choose) + feed_forward(layer.shared_experts, y, scope.options.partial_sums))

    return apply_layer


def key_map(config: BiasedMoeConfig, attention: Callable[[], Iterable[LayerTensor]]) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout.

    Args:
      attention: the tensors of a layer's attention.
    """

    def of_layer(kind: str) -> Iterator[LayerTensor]:
        yield from attention()
        yield from layer_norm_tensors(config)
        if kind == DENSE:
            yield from mlp_tensors(config, config.dense_hidden_size)
            return
        yield LayerTensor("mlp.gate.weight", (config.num_experts, config.hidden_size), ("router",))
        yield LayerTensor("mlp.gate.e_score_correction_bias", (config.num_experts,), ("router_correction",))
        yield from expert_tensors(config)
        yield from mlp_tensors(config, config.shared_hidden_size, "mlp.shared_experts", "shared_experts")

    return decoder_entries(config, of_layer)


def experts_in(config_json: Mapping[str, Any]) -> Any:
    """The number of routed experts under any of its names."""
    return agreeing({name: config_json.get(name) for name in EXPERT_SPELLINGS})
