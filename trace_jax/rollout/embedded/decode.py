"""Prefill and decode under jit, with capture of the guidance record and the routes.

One wave of requests:

1. `prefill` runs all prompts (padded on the right), fills the cache and draws each row's first token.
2. `decode` feeds the newest token of every row, draws the next one, and repeats for a fixed number of steps; the engine
   calls it until every row is done. A finished row is fed on, its results are dropped by the engine.

What is recorded for a token comes from the pass in which the token was the input, so the last token of a sequence has no
record.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from pallas_kernels import mantissa_bits
from pallas_kernels.pytrees import register_arrays
from trace_jax.guidance.site_record import RecordKind
from trace_jax.layers.kv_cache import KVCache
from trace_jax.layers.logprobs import logits_of
from trace_jax.models.inputs import ForwardInputs
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import QuantPlan
from trace_jax.quantization.sites import Captured
from trace_jax.rollout.embedded.sampler import sample

SiteCapture = dict[str, Shaped[Array, "Ls B T ..."] | None]
"""`data`, `scales` and `multiplier` of one site, leading axes `[Ls, B, T]`."""


@dataclass(frozen=True)
class CaptureSpec:
    """What to record: `kind` (`none`, `scales`, `mantissa`, `codes`), the sites, and the layers (global ids)."""

    kind: RecordKind | Literal["none"] = "none"
    sites: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class DecodeSpec:
    """Static description of a wave."""

    policy: Policy
    plan: QuantPlan
    capture: CaptureSpec
    truncated: bool


@register_arrays
@dataclass(frozen=True)
class Sampling:
    """Per-row sampling settings.

    Args:
      seed: uint32; the token at position p is drawn with the key of the seed folded with p.
      temperature, top_p, top_k: see `sample`.
      limit: position of the last token a row may hold.
      stop: token ids that end a row, -1 where unused.
    """

    seed: UInt32[Array, " B"]
    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    limit: Int[Array, " B"]
    stop: Int[Array, "B n"]


@register_arrays
@dataclass(frozen=True)
class RowState:
    """The newest token of each row (drawn, not yet fed), its position, and whether the row is finished."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    done: Bool[Array, " B"]


@register_arrays
@dataclass(frozen=True)
class Drawn:
    """Tokens drawn in one or several steps, with their log-probabilities; `live` is false for rows that had finished."""

    token: Int[Array, " B *steps"]
    logprob: Float[Array, " B *steps"]
    live: Bool[Array, " B *steps"]


@register_arrays
@dataclass(frozen=True)
class Fed:
    """Records of tokens that were fed: routes `[B, T, Lm, k]` and per site a `SiteCapture`."""

    routes: Int[Array, "B T Lm k"]
    sites: dict[str, SiteCapture]


@functools.partial(jax.jit, static_argnames=("spec", "slots"))
def prefill(
    params: Params,
    multipliers: Multipliers,
    channels: Channels,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    sampling: Sampling,
    *,
    spec: DecodeSpec,
    slots: int,
) -> tuple[KVCache, RowState, Drawn, Fed]:
    """Runs the prompts and draws the first token of each row.

    Args:
      tokens: prompts, padded on the right.
      lengths: real prompt lengths, at least 1.
      spec, slots: static; `slots` is the cache length.
    """
    batch, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    cache = spec.policy.empty_cache(batch, slots, spec.plan)
    hidden, cache, fed = _run(params, multipliers, channels, tokens, positions, cache, spec, positions < lengths[:, None])
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    state = RowState(jnp.zeros_like(lengths), lengths - 1, jnp.zeros(batch, bool))
    state, drawn = _draw(last, params, state, sampling, spec)
    return cache, state, drawn, fed


@functools.partial(jax.jit, static_argnames=("spec", "steps"), donate_argnums=(3,))
def decode(
    params: Params,
    multipliers: Multipliers,
    channels: Channels,
    cache: KVCache,
    state: RowState,
    sampling: Sampling,
    *,
    spec: DecodeSpec,
    steps: int,
) -> tuple[KVCache, RowState, Drawn, Fed]:
    """Feeds and draws `steps` tokens per row; `Drawn` is `[B, steps]`, `Fed` has T = steps."""

    def step(carry: tuple[KVCache, RowState], _: None) -> tuple[tuple[KVCache, RowState], tuple[Drawn, Fed]]:
        cache, state = carry
        hidden, cache, fed = _run(params, multipliers, channels, state.token[:, None], state.position[:, None], cache, spec)
        state, drawn = _draw(hidden[:, 0], params, state, sampling, spec)
        return (cache, state), (drawn, fed)

    (cache, state), (drawn, fed) = jax.lax.scan(step, (cache, state), None, length=steps)
    drawn = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), drawn)
    routes = jnp.moveaxis(fed.routes[:, :, 0], 0, 1)
    sites = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, :, 0], 0, 2), fed.sites)
    return cache, state, drawn, Fed(routes, sites)


def _run(
    params: Params,
    multipliers: Multipliers,
    channels: Channels,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: KVCache,
    spec: DecodeSpec,
    counting: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], KVCache, Fed]:
    slots = jnp.arange(cache.num_slots, dtype=jnp.int32)
    mask = slots[None, None, :] <= positions[:, :, None]
    inputs = ForwardInputs(tokens, positions, mask, multipliers, cache=cache, counting=counting, channels=channels)
    capture = spec.capture.sites if spec.capture.kind != "none" else ()
    output = spec.policy.forward(params, inputs, spec.policy.options(spec.plan, capture=capture))
    assert output.cache is not None  # a cache went in
    sites = {name: _recorded(name, captured, spec) for name, captured in output.captured.items()}
    return output.hidden, output.cache, Fed(output.routes, sites)


def _recorded(site: str, captured: Captured, spec: DecodeSpec) -> SiteCapture:
    found = spec.policy.config.sites[site]
    layers = jnp.asarray([found.layer_ids.index(layer) for layer in spec.capture.layers if layer in found.layer_ids], jnp.int32)
    codes = captured.codes[layers]
    data: dict[str, Any] = {"codes": codes, "scales": None, "mantissa": None}
    if spec.capture.kind == "mantissa":
        data["mantissa"] = mantissa_bits(codes, found.width)
    return {
        "data": data[spec.capture.kind],
        "scales": captured.scales[layers],
        "multiplier": None if captured.multiplier is None else captured.multiplier[layers],
    }


def _draw(hidden: Float[Array, "B D"], params: Params, state: RowState, sampling: Sampling, spec: DecodeSpec) -> tuple[RowState, Drawn]:
    logits = logits_of(hidden, spec.policy.head(params))
    position = state.position + 1
    keys = jax.vmap(lambda seed, p: jax.random.fold_in(jax.random.key(seed), p))(sampling.seed, position)
    token, logprob = sample(logits, keys, sampling.temperature, sampling.top_p, sampling.top_k, truncated=spec.truncated)
    live = ~state.done
    stopped = jnp.any(token[:, None] == sampling.stop, axis=-1)
    done = state.done | stopped | (position >= sampling.limit)
    return RowState(token, position, done), Drawn(token, logprob, live)
