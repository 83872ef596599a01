"""Weight updates: the trainer's float32 masters as the tensors an engine loads, and back.

1. `layer_updates` rounds the masters once, on the trainer's device: BF16 for everything outside the experts, codes + block
   scales + multipliers for the experts in a block format, and the static multipliers of activations and KV cache.
2. Names are those of Hugging Face checkpoints, except that the experts of a layer travel stacked, in every family under the name that
   Qwen3-MoE has for them without the expert's number (`model.layers.0.mlp.experts.gate_proj.weight`, leading axis E), and that of a
   tensor which holds several parameters each one travels alone, under the path of the parameter.
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
from trace_jax.models.key_map import FLOAT32_LEAVES, Entry, TreePath, nest
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params, key_map, param_shapes
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import SITES, QuantPlan, block_format_name
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
    """The static multipliers among the tensors of a complete update, on the host; 1 at layers without the site."""
    return {
        site: np.asarray([tensors.get(_static_name(site, layer), 1.0) for layer in range(num_layers)], np.float32)
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
    dtype, config = jnp.dtype(policy.compute_dtype), policy.config
    layers: list[Tensors] = [{} for _ in range(config.num_layers)]
    rest: Tensors = {}
    for entry in _plain_entries(policy):
        tensor = _at(params, entry.path)[entry.position].astype(_dtype(entry, dtype))
        (rest if entry.layer is None else layers[entry.layer])[_name(entry)] = tensor
    for stack in config.stacks:
        experts = _at(params, stack.path).get("experts")
        for index, layer in enumerate(stack.layer_ids) if experts else ():
            masters = ExpertWeights(*(experts[name][index] for name in ExpertWeights._fields))
            encoded = _encode_experts(masters, plan, dtype)
            layers[layer] |= {f"model.layers.{layer}.mlp.experts.{name}": tensor for name, tensor in encoded.items()}
    for site, values in multipliers.items():
        for layer in config.layers_of(site):
            layers[layer][_static_name(site, layer)] = values[layer]
    return layers, rest


def _encode_experts(masters: ExpertWeights, plan: QuantPlan, dtype: jnp.dtype) -> Tensors:
    if block_format_name(plan.weights) is None:
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
    dtype, config = jnp.dtype(policy.compute_dtype), policy.config
    parts: dict[TreePath, list[jax.Array]] = {}
    for entry in _plain_entries(policy):  # those of a stack come in the order of its layers
        parts.setdefault(entry.path, []).append(tensors[_name(entry)])
    for stack in config.stacks:
        if "expert_input" in config.sites_of(stack.kind):
            for name in ExpertWeights._fields:
                prefixes = [f"model.layers.{layer}.mlp.experts.{name}_proj" for layer in stack.layer_ids]
                parts[*stack.path, "experts", name] = [_decode_expert(tensors, prefix, plan, policy, dtype) for prefix in prefixes]
    params = nest({path: jnp.stack(part) if path[0] == "groups" else part[0] for path, part in parts.items()})
    one = jnp.ones((), jnp.float32)
    multipliers = {
        site: jnp.stack([tensors.get(_static_name(site, layer), one) for layer in range(config.num_layers)]) for site in static_sites(plan)
    }
    return params, multipliers


def _decode_expert(tensors: Tensors, prefix: str, plan: QuantPlan, policy: Policy, dtype: jnp.dtype) -> Float[jax.Array, "E out in"]:
    codes = tensors[f"{prefix}.weight"]
    name = block_format_name(plan.weights)
    if name is None:
        return codes.astype(dtype)
    block = block_format(name)
    multiplier = None
    if block.has_multiplier:
        multiplier = jnp.broadcast_to(tensors[f"{prefix}.weight_scale_2"][:, None], codes.shape[:-1])
    width = policy.config.expert_hidden_size if prefix.endswith("down_proj") else policy.config.hidden_size
    return dequantize(Quantized(codes=codes, scales=tensors[f"{prefix}.weight_scale"], multiplier=multiplier, size=width, fmt=block), dtype)


def _at(tree: Any, path: TreePath) -> Any:
    """The subtree or leaf of a parameter tree at a path."""
    return functools.reduce(lambda subtree, key: subtree[key], path, tree)


def _plain_entries(policy: Policy) -> list[Entry]:
    """Every tensor outside the experts' weights."""
    return [entry for entry in key_map(policy.family, policy.config) if not entry.is_expert]


def _name(entry: Entry) -> str:
    """What a tensor is called in an update."""
    if not entry.part:
        return entry.name
    return f"model.layers.{entry.layer}.{'.'.join(str(key) for key in entry.path if isinstance(key, str) and key != 'groups')}"


def _dtype(entry: Entry, dtype: jnp.dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float32) if entry.path[-1] in FLOAT32_LEAVES else dtype


def _static_name(site: str, layer: int) -> str:
    return f"model.layers.{layer}.{_STATIC_NAMES[site]}"
