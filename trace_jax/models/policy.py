"""A policy: a model family, its config, and the choices both paths must share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from trace_jax.layers.experts import choose_implementation
from trace_jax.layers.kv_cache import KVCache, RecurrentState, init_cache
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput
from trace_jax.models.registry import ModelConfig, Params, apply, output_head
from trace_jax.quantization.plan import QuantPlan


@dataclass(frozen=True)
class Policy:
    """Static description of a policy; the parameters and multipliers are passed beside it.

    Args:
      family: model family, see `trace_jax.models.registry`.
      config: the family's config.
      compute_dtype: `bfloat16` or `float32`.
      experts_implementation: `auto`, `dense` or `ragged`; the same for rollout and trainer, because they round differently.
      remat: whether the trainer recomputes layer activations.
      partial_sums: shares in which attention output and experts are summed; above 1 only for a rollout that stands for an
        engine of several devices (`layers/partial_sums.py`).
    """

    family: str
    config: ModelConfig
    compute_dtype: str = "bfloat16"
    experts_implementation: str = "auto"
    remat: bool = False
    partial_sums: int = 1

    def options(self, plan: QuantPlan, **changes: Any) -> ForwardOptions:
        """Forward options of this policy under a quantization plan."""
        config = self.config
        experts = choose_implementation(self.experts_implementation, config.num_experts, config.hidden_size, config.expert_hidden_size)
        return ForwardOptions(
            plan=plan, compute_dtype=self.compute_dtype, experts_implementation=experts, partial_sums=self.partial_sums, **changes
        )

    def forward(self, params: Params, inputs: ForwardInputs, options: ForwardOptions) -> ForwardOutput:
        """The forward pass."""
        return apply(self.family, self.config, params, inputs, options)

    def empty_cache(self, batch: int, slots: int, plan: QuantPlan) -> KVCache:
        """A cache for `batch` sequences of at most `slots` tokens, in the formats of the plan."""
        config, dtype = self.config, jnp.dtype(self.compute_dtype)
        heads, key, value = config.cache_shape
        cache = init_cache(len(config.cache_layer_ids), batch, slots, heads, key, plan, dtype, value)
        layers = len(config.recurrent_layer_ids)
        if not layers:
            return cache
        heads, key, value, earlier, channels = config.recurrent_shape
        state = jnp.zeros((layers, batch, heads, key, value), jnp.float32)
        return replace(cache, recurrent=RecurrentState(state, jnp.zeros((layers, batch, earlier, channels), dtype)))

    def head(self, params: Params) -> Any:
        """The output head `[V, D]`."""
        return output_head(self.family, self.config, params)
