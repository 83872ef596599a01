"""What a decoder's forward pass takes and returns, whatever the family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pytrees import register_arrays
from trace_jax.layers.kv_cache import KVCache
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import UNQUANTIZED, QuantPlan
from trace_jax.quantization.sites import Captured, GuideBatch


@dataclass(frozen=True)
class ForwardOptions:
    """Static choices of a forward pass.

    Args:
      plan: what is rounded where.
      compute_dtype: `bfloat16` or `float32`.
      experts_implementation: `dense` or `ragged`; rollout and trainer must agree.
      partial_sums: into how many shares attention output and experts are summed (`layers/partial_sums.py`).
      remat: whether layer activations are recomputed in the backward pass.
      capture: sites whose codes and scales are returned.
      observe: `amax` returns the largest magnitude per site and layer, `values` the site values before and after rounding, `residual` the
        squared rounding error per layer and channel, without that of tokens that see no key (padding).
      measure_parity: whether guided sites report how often nearest rounding agrees with the record.
    """

    plan: QuantPlan = UNQUANTIZED
    compute_dtype: str = "bfloat16"
    experts_implementation: str = "dense"
    partial_sums: int = 1
    remat: bool = False
    capture: tuple[str, ...] = ()
    observe: str | None = None
    measure_parity: bool = False


class SiteValues(NamedTuple):
    """A site's values before and after rounding."""

    before: Float[Array | np.ndarray, "*site"]
    after: Float[Array | np.ndarray, "*site"]


@register_arrays
@dataclass(frozen=True)
class ForwardInputs:
    """Arrays of a forward pass.

    Args:
      tokens: int32 token ids.
      positions: int32 positions within the sequence; also the cache slots.
      mask: which keys a query sees: `[B, T, T]`, or `[B, T, S]` over the slots of a cache.
      multipliers: static decode multipliers per site and layer; also for layers without the site, where nothing reads them.
      routes: expert ids to replay at the layers that have experts, -1 where the router is free.
      guides: the rollout's guidance record.
      cache: keys and values of earlier tokens; the forward appends to it.
      counting: tokens that enter the state of recurrent layers; None for all. In each row they come first.
      channels: channels of the experts' inputs whose residual is compensated, per site and layer; the experts' weights have their columns
        once more (`with_channel_columns`).
    """

    tokens: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    mask: Bool[Array, "B T S"]
    multipliers: Multipliers
    routes: Int[Array, "B T Lm k"] | None = None
    guides: GuideBatch | None = None
    cache: KVCache | None = None
    counting: Bool[Array, "B T"] | None = None
    channels: Channels = field(default_factory=dict)


@register_arrays
@dataclass(frozen=True)
class ForwardOutput:
    """Results of a forward pass.

    Args:
      hidden: final hidden states after the last norm, compute dtype.
      routes: expert ids that were used, at the layers that have experts.
      own_routes: what the router would have chosen; equal to `routes` without replay.
      captured: per site, codes and scales with a leading axis over the layers that have the site, as the following ones.
      observed: per site, amax `[Ls]`, squared residuals `[Ls, width]`, or `SiteValues` with axes `[Ls, B, T, ...]`.
      parity: per guided site, (sum, count) of agreement, each `[Ls]`.
      cache: the cache with the new tokens, None without one.
    """

    hidden: Float[Array, "B T D"]
    routes: Int[Array, "B T Lm k"]
    own_routes: Int[Array, "B T Lm k"]
    captured: dict[str, Captured]
    observed: dict[str, Any]
    parity: dict[str, tuple[Float[Array, " L"], Float[Array, " L"]]]
    cache: KVCache | None
