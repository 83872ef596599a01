"""Weight updates: the trainer's float32 masters as the tensors an engine loads, and back.

1. `layer_updates` rounds the masters once, on the trainer's device: BF16 for everything outside the experts, codes + block
   scales + multipliers for the experts in a block format, and the static multipliers of activations and KV cache.
2. Names are those of Hugging Face checkpoints, except that the experts of a layer travel stacked under the name without
   the expert's number (`model.layers.0.mlp.experts.gate_proj.weight`, leading axis E).
3. `decode_updates` turns a complete set back into a parameter tree in the compute dtype; decoded values are exact.

On a mesh each device rounds its own share, and a layer is brought together on one device when it is its turn.

Not guaranteed: anything for an incomplete set. `expected_tensors` is the list both sides compare with.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped

from pallas_kernels import Quantized, block_format, dequantize
from trace_jax.layers.experts import ExpertWeights
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, key_map, param_shapes
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import BLOCK_FORMATS, SITES, QuantPlan
from trace_jax.quantization.weights import fake_quant_experts, quantize_experts
from trace_jax.rollout.weight_update import LayerUpdate
from trace_jax.sharding.mesh import on_mesh_of
from trace_jax.sharding.placement import on_one_device

Tensors = dict[str, Shaped[jax.Array, "..."]]

_STATIC_NAMES = {
    "expert_input": "mlp.experts.input_scale",
    "down_input": "mlp.experts.down_proj.input_scale",
    "k": "self_attn.k_proj.k_scale",
    "v": "self_attn.v_proj.v_scale",
}


def static_sites(plan: QuantPlan) -> tuple[str, ...]:
    """Sites whose static multiplier belongs to an update: NVFP4 without per-token scales."""
    return () if plan.per_token else tuple(site for site in SITES if plan.site(site).format == "nvfp4")


def received_multipliers(tensors: Mapping[str, Any], plan: QuantPlan, num_layers: int) -> dict[str, Float[np.ndarray, " L"]]:
    """The static multipliers among the tensors of a complete update, on the host."""
    return {
        site: np.asarray([tensors[f"model.layers.{layer}.{_STATIC_NAMES[site]}"] for layer in range(num_layers)], np.float32)
        for site in static_sites(plan)
    }


def layer_updates(policy: Policy, plan: QuantPlan, params: Params, multipliers: Mapping[str, Float[Any, " L"]]) -> Iterator[LayerUpdate]:
    """The update of all layers, then of the tensors outside the layers (`layer_id` None).

    Args:
      params: float32 masters.
      multipliers: static multipliers of the plan's sites.
    """
    with on_mesh_of(params):
        layers, rest = _encode(params, {site: multipliers[site] for site in static_sites(plan)}, policy=policy, plan=plan)
    for layer_id, tensors in enumerate(layers):
        yield LayerUpdate(layer_id, on_one_device(tensors))
    yield LayerUpdate(None, on_one_device(rest))


def decode_updates(policy: Policy, plan: QuantPlan, tensors: Mapping[str, Any]) -> tuple[Params, Multipliers]:
    """Parameters in the compute dtype and static multipliers from the tensors of a complete update."""
    return _decode({name: jnp.asarray(tensor) for name, tensor in tensors.items()}, policy=policy, plan=plan)


@functools.lru_cache(maxsize=16)
def expected_tensors(policy: Policy, plan: QuantPlan) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor of an update."""
    shapes = param_shapes(policy.family, policy.config)
    multipliers = {site: jax.ShapeDtypeStruct((policy.config.num_layers,), jnp.float32) for site in static_sites(plan)}
    layers, rest = jax.eval_shape(functools.partial(_encode, policy=policy, plan=plan), shapes, multipliers)
    named = [*(item for layer in layers for item in layer.items()), *rest.items()]
    return {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in named}


@functools.partial(jax.jit, static_argnames=("policy", "plan"))
def _encode(params: Params, multipliers: Multipliers, *, policy: Policy, plan: QuantPlan) -> tuple[list[Tensors], Tensors]:
    dtype = jnp.dtype(policy.compute_dtype)
    layers: list[Tensors] = [{} for _ in range(policy.config.num_layers)]
    rest: Tensors = {}
    for name, path, layer_id in _plain_entries(policy):
        leaf = _at(params, path)
        if layer_id is None:
            rest[name] = leaf.astype(dtype)
        else:
            layers[layer_id][name] = leaf[layer_id].astype(dtype)
    for layer_id in range(policy.config.num_layers):
        prefix = f"model.layers.{layer_id}."
        masters = ExpertWeights(*(params["groups"][0]["experts"][name][layer_id] for name in ExpertWeights._fields))
        layers[layer_id] |= {f"{prefix}mlp.experts.{name}": tensor for name, tensor in _encode_experts(masters, plan, dtype).items()}
        layers[layer_id] |= {prefix + _STATIC_NAMES[site]: value[layer_id] for site, value in multipliers.items()}
    return layers, rest


def _encode_experts(masters: ExpertWeights, plan: QuantPlan, dtype: jnp.dtype) -> Tensors:
    if plan.weights not in BLOCK_FORMATS:
        weights = fake_quant_experts(masters, plan.weights)
        return {f"{name}_proj.weight": w.astype(dtype) for name, w in zip(ExpertWeights._fields, weights, strict=True)}
    tensors = {}
    for name, quantized in quantize_experts(masters, plan.weights).items():
        tensors[f"{name}_proj.weight"] = quantized.codes
        tensors[f"{name}_proj.weight_scale"] = quantized.scales
        if quantized.multiplier is not None:
            tensors[f"{name}_proj.weight_scale_2"] = quantized.multiplier[:, 0]
    return tensors


@functools.partial(jax.jit, static_argnames=("policy", "plan"))
def _decode(tensors: Tensors, *, policy: Policy, plan: QuantPlan) -> tuple[Params, Multipliers]:
    dtype = jnp.dtype(policy.compute_dtype)
    layer_ids = range(policy.config.num_layers)
    params = jax.tree.map(lambda leaf: None, param_shapes(policy.family, policy.config))
    for name, path, layer_id in _plain_entries(policy):
        parent = _at(params, path[:-1])
        if layer_id is None:
            parent[path[-1]] = tensors[name]
        elif layer_id == 0:
            parent[path[-1]] = jnp.stack([tensors[name.replace("layers.0.", f"layers.{i}.", 1)] for i in layer_ids])
    for name in ExpertWeights._fields:
        decoded = [_decode_expert(tensors, f"model.layers.{i}.mlp.experts.{name}_proj", plan, policy, dtype) for i in layer_ids]
        params["groups"][0]["experts"][name] = jnp.stack(decoded)
    multipliers = {site: jnp.stack([tensors[f"model.layers.{i}.{_STATIC_NAMES[site]}"] for i in layer_ids]) for site in static_sites(plan)}
    return params, multipliers


def _decode_expert(tensors: Tensors, prefix: str, plan: QuantPlan, policy: Policy, dtype: jnp.dtype) -> Float[jax.Array, "E out in"]:
    codes = tensors[f"{prefix}.weight"]
    if plan.weights not in BLOCK_FORMATS:
        return codes.astype(dtype)
    block = block_format(plan.weights)
    multiplier = None
    if block.has_multiplier:
        multiplier = jnp.broadcast_to(tensors[f"{prefix}.weight_scale_2"][:, None], codes.shape[:-1])
    width = policy.config.expert_hidden_size if prefix.endswith("down_proj") else policy.config.hidden_size
    return dequantize(Quantized(codes=codes, scales=tensors[f"{prefix}.weight_scale"], multiplier=multiplier, size=width, fmt=block), dtype)


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    """The subtree or leaf of a parameter tree at a path."""
    return functools.reduce(lambda subtree, key: subtree[key], path, tree)


def _plain_entries(policy: Policy) -> list[tuple[str, tuple[str | int, ...], int | None]]:
    """Name, path and layer of every tensor outside the experts."""
    entries = key_map(policy.family, policy.config)
    return [(e.name, e.path, e.position[0] if e.position else None) for e in entries if len(e.position) < 2]
