"""The forward pass of Qwen3-MoE, in order:

1. Embed the tokens in the compute dtype.
2. For each layer of the scanned group: attention over rounded keys and values (after RoPE; the newest included), then
   the experts: route, round the expert input once per token, fake-quantize the experts' weights, round the input of the
   down projection.
3. Normalise. `output_head` gives the matrix for the logits.

Source: Qwen3 technical report, arXiv 2505.09388, and the layout of its Hugging Face checkpoints.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels import keep_rounding, rope_tables, rotate, round_to_bf16
from trace_jax.layers import partial_sums
from trace_jax.layers.attention import attend
from trace_jax.layers.experts import ExpertWeights, apply_experts
from trace_jax.layers.kv_cache import KVCache, append, read
from trace_jax.layers.norm import rms_norm
from trace_jax.layers.router import route
from trace_jax.models.inputs import ForwardInputs, ForwardOptions, ForwardOutput, SiteValues
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.qwen3_moe.modules import Layer, Qwen3Moe
from trace_jax.quantization.channels import channel_energy
from trace_jax.quantization.sites import parity_agreement, round_site
from trace_jax.quantization.weights import fake_quant_experts
from trace_jax.sharding.axes import BATCH, constrain
from trace_jax.sharding.rules import gathered

MODULE = Qwen3Moe


def forward(model: Qwen3Moe, config: Qwen3MoeConfig, inputs: ForwardInputs, options: ForwardOptions) -> ForwardOutput:
    """Runs the decoder.

    Args:
      model: merged NNX module with float32 (or compute-dtype) parameters.
      config: shape of the model; static.
      inputs: tokens, positions, mask and the optional replay, guidance and cache.
      options: static choices.

    Returns:
      Hidden states and everything that was asked for, see `ForwardOutput`.
    """
    dtype = jnp.dtype(options.compute_dtype)
    x = constrain(constrain(model.embed.weight[...], "tensor")[inputs.tokens].astype(dtype), BATCH)
    graphdef, stacked = nnx.split(model.groups[0])
    layer_ids = jnp.arange(config.num_layers, dtype=jnp.int32)
    routes = None if inputs.routes is None else jnp.moveaxis(inputs.routes, 2, 0)
    turns = rope_tables(inputs.positions, config.head_dim, config.rope_theta)

    def body(
        carry: tuple[Float[Array, "B T D"], KVCache | None], xs: Any
    ) -> tuple[tuple[Float[Array, "B T D"], KVCache | None], dict[str, Any]]:
        state, layer_id, multipliers, channels, replay = xs
        layer = nnx.merge(graphdef, gathered(state))
        x, cache = carry
        x, cache, extras = _attention_block(layer, config, x, cache, layer_id, multipliers, turns, inputs, options)
        x, more = _expert_block(layer, config, x, layer_id, multipliers, channels, replay, inputs, options)
        return (constrain(x, BATCH), cache), {name: extras.get(name, {}) | more.get(name, {}) for name in extras | more}

    if options.remat:
        body = jax.checkpoint(body)
    (x, cache), extras = jax.lax.scan(body, (x, inputs.cache), (stacked, layer_ids, inputs.multipliers, inputs.channels, routes))
    return ForwardOutput(
        hidden=_normed(x, model.final_norm, config),
        routes=jnp.moveaxis(extras["routes"]["used"], 0, 2),
        own_routes=jnp.moveaxis(extras["routes"]["own"], 0, 2),
        captured=extras["captured"],
        observed=extras["observed"],
        parity=extras["parity"],
        cache=cache,
    )


def output_head(model: Qwen3Moe, config: Qwen3MoeConfig) -> Float[Array, "V D"]:
    """The matrix that turns hidden states into logits."""
    return constrain(model.embed.weight[...] if config.tie_embeddings else model.lm_head.weight[...], "tensor")


def _attention_block(
    layer: Layer,
    config: Qwen3MoeConfig,
    x: Float[Array, "B T D"],
    cache: KVCache | None,
    layer_id: Int[Array, ""],
    multipliers: dict[str, Float[Array, ""]],
    turns: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
    inputs: ForwardInputs,
    options: ForwardOptions,
) -> tuple[Float[Array, "B T D"], KVCache | None, dict[str, dict[str, Any]]]:
    attention = layer.attention
    normed = _normed(x, layer.input_norm, config)

    def project(name: str, heads: int) -> Float[Array, "B T {heads} head_dim"]:
        y = normed @ getattr(attention, f"{name}_proj")[...].astype(x.dtype).T
        if config.attention_bias:
            y = y + getattr(attention, f"{name}_bias")[...].astype(x.dtype)[None, None, :]
        return y.reshape(*y.shape[:2], heads, config.head_dim)

    query = _normed(project("q", config.num_heads), attention.q_norm, config)
    key = _normed(project("k", config.num_kv_heads), attention.k_norm, config)
    query, key = rotate(query, *turns), rotate(key, *turns)
    value = project("v", config.num_kv_heads)

    extras = _site_extras()
    rounded_key = _round("k", key, layer_id, multipliers, inputs, options, extras, lead=1)
    rounded_value = _round("v", value, layer_id, multipliers, inputs, options, extras, lead=1)
    if cache is not None:
        cache = KVCache(
            append(cache.k, layer_id, inputs.positions, rounded_key, extras["kept"].get("k")),
            append(cache.v, layer_id, inputs.positions, rounded_value, extras["kept"].get("v")),
        )
        rounded_key = read(cache.k, layer_id, config.head_dim, multipliers.get("k"), x.dtype)
        rounded_value = read(cache.v, layer_id, config.head_dim, multipliers.get("v"), x.dtype)
    del extras["kept"]
    attended = attend(query, rounded_key, rounded_value, inputs.mask)
    update = partial_sums.matmul(attended.reshape(*x.shape[:2], -1), attention.o_proj[...].astype(x.dtype).T, options.partial_sums)
    if config.attention_bias:
        update = keep_rounding(update + attention.o_bias[...].astype(x.dtype)[None, None, :])
    return x + update, cache, extras


def _expert_block(
    layer: Layer,
    config: Qwen3MoeConfig,
    x: Float[Array, "B T D"],
    layer_id: Int[Array, ""],
    multipliers: dict[str, Float[Array, ""]],
    channels: dict[str, Int[Array, " _"]],
    replay: Int[Array, "B T k"] | None,
    inputs: ForwardInputs,
    options: ForwardOptions,
) -> tuple[Float[Array, "B T D"], dict[str, dict[str, Any]]]:
    normed = _normed(x, layer.post_attention_norm, config)
    if options.observe == "residual":  # zeros leave no residual, neither here nor, through their products, at the down projection
        normed = jnp.where(jnp.any(inputs.mask, axis=-1, keepdims=True), normed, jnp.zeros_like(normed))
    logits = jnp.matmul(normed, layer.router[...].astype(x.dtype).T, preferred_element_type=jnp.float32)
    ids, mixing, own = route(logits, config.experts_per_token, config.norm_topk_prob, replay)

    extras = _site_extras()
    rounded = _round("expert_input", normed, layer_id, multipliers, inputs, options, extras, lead=0, channels=channels.get("expert_input"))
    del extras["kept"]
    weights = fake_quant_experts(layer.experts.weights(), options.plan.weights)

    def quantize_hidden(hidden: Float[Array, "*rows F"]) -> Float[Array, "*rows width"]:
        site, plan = "down_input", options.plan
        rounded = round_site(site, hidden, plan.site(site), multipliers.get(site), per_token=plan.per_token, channels=channels.get(site))[0]
        if options.observe != "values":
            _observe(options.observe, site, hidden, rounded, extras)
        return rounded

    k = config.experts_per_token
    update = apply_experts(
        rounded.reshape(-1, rounded.shape[-1]),
        ids.reshape(-1, k),
        mixing.reshape(-1, k),
        ExpertWeights(*(w.astype(x.dtype) for w in weights)),
        quantize_hidden,
        options.experts_implementation,
        options.partial_sums,
    )
    return x + update.reshape(x.shape), {**extras, "routes": {"used": ids, "own": own}}


def _normed(x: Float[Array, "*rows D"], weight: nnx.Param, config: Qwen3MoeConfig) -> Float[Array, "*rows D"]:
    # An engine holds norm weights in BF16. A cast to BF16 and back could be folded away by XLA on GPU, so the master is
    # rounded arithmetically.
    scale = weight[...]
    if x.dtype == jnp.bfloat16 and scale.dtype == jnp.float32:
        scale = round_to_bf16(scale)
    return rms_norm(x, scale, config.rms_norm_eps)


def _site_extras() -> dict[str, dict[str, Any]]:
    return {"captured": {}, "observed": {}, "parity": {}, "kept": {}}


def _round(
    site: str,
    x: Float[Array, "B T *width"],
    layer_id: Int[Array, ""],
    multipliers: dict[str, Float[Array, ""]],
    inputs: ForwardInputs,
    options: ForwardOptions,
    extras: dict[str, dict[str, Any]],
    lead: int,
    channels: Int[Array, " c"] | None = None,
) -> Float[Array, "B T *rounded"]:
    plan, multiplier = options.plan.site(site), multipliers.get(site)
    guide = inputs.guides.of(site, layer_id, lead) if plan.guided and inputs.guides is not None else None
    wanted = site in options.capture or (inputs.cache is not None and site in ("k", "v"))
    rounded, captured = round_site(
        site, x, plan, multiplier, per_token=options.plan.per_token, guide=guide, capture=wanted, channels=channels
    )
    _observe(options.observe, site, x, rounded, extras)
    if captured is not None:
        extras["kept"][site] = captured
        if site in options.capture:
            extras["captured"][site] = captured
    if options.measure_parity and guide is not None and guide.kind != "scales":
        extras["parity"][site] = parity_agreement(site, x, rounded, guide, plan, multiplier)
    return rounded


def _observe(
    kind: str | None, site: str, x: Float[Array, "*site"], rounded: Float[Array, "*rounded"], extras: dict[str, dict[str, Any]]
) -> None:
    observed = extras["observed"]
    if kind == "amax":
        observed[site] = jnp.max(jnp.abs(x)).astype(jnp.float32)
    elif kind == "values":
        observed[site] = SiteValues(x, rounded)
    elif kind == "residual":
        observed[site] = channel_energy(x, rounded)
