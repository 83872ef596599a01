"""Which axis of each parameter is divided over which axis of the mesh.

A rule belongs to the end of a parameter's path, so all families share them and the optimizer's moments, whose paths end like those of
their parameters, follow. Layers are stacked: the leading axis of everything below `groups` is never divided.

Quantization blocks run along the last axis of the experts' weights. `fsdp` therefore divides another one; `tensor` has to divide the
hidden width of the experts, which is the contraction axis of the down projection, and is refused where a block would straddle two shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from pallas_kernels import block_format
from trace_jax.errors import UserError
from trace_jax.quantization.plan import BLOCK_FORMATS, block_format_name
from trace_jax.sharding.axes import AxisName, constrain, in_mesh

EXPERT_ROWS, EXPERT_COLUMNS = ("expert", ("tensor", "fsdp"), None), ("expert", "fsdp", "tensor")
OUTPUT, INPUT, TABLE = ("tensor", "fsdp"), ("fsdp", "tensor"), ("tensor", "fsdp")

RULES: dict[str, tuple[AxisName, ...]] = {
    "embed/weight": TABLE,
    "lm_head/weight": TABLE,
    "final_norm": (),
    "input_norm": (),
    "post_attention_norm": (),
    "attention/q_proj": OUTPUT,
    "attention/k_proj": OUTPUT,
    "attention/v_proj": OUTPUT,
    "attention/o_proj": INPUT,
    "attention/q_norm": (),
    "attention/k_norm": (),
    "attention/q_bias": ("tensor",),
    "attention/k_bias": ("tensor",),
    "attention/v_bias": ("tensor",),
    "attention/o_bias": (),
    "attention/sinks": ("tensor",),
    "attention/q_a_proj": (None, "fsdp"),
    "attention/q_a_norm": (),
    "attention/q_b_proj": OUTPUT,
    "attention/kv_a_proj": (None, "fsdp"),
    "attention/kv_a_norm": (),
    "attention/kv_b_proj": OUTPUT,
    "mlp/gate": OUTPUT,
    "mlp/up": OUTPUT,
    "mlp/down": INPUT,
    "shared_experts/gate": OUTPUT,
    "shared_experts/up": OUTPUT,
    "shared_experts/down": INPUT,
    "router": (None, "fsdp"),
    "router_bias": (),
    "router_correction": (),
    "shared_gate": (None, "fsdp"),
    "expert_biases/gate": EXPERT_ROWS[:2],
    "expert_biases/up": EXPERT_ROWS[:2],
    "expert_biases/down": ("expert",),
    "delta_net/qkv_proj": (None, "fsdp"),
    "delta_net/z_proj": (None, "fsdp"),
    "delta_net/a_proj": (None, "fsdp"),
    "delta_net/b_proj": (None, "fsdp"),
    "delta_net/o_proj": ("fsdp",),
    "delta_net/conv": (),
    "delta_net/a_log": (),
    "delta_net/dt_bias": (),
    "delta_net/norm": (),
    "experts/gate": EXPERT_ROWS,
    "experts/up": EXPERT_ROWS,
    "experts/down": EXPERT_COLUMNS,
}
"""End of a path -> the mesh axes that divide the axes of one layer's array; axes that are not named stay whole."""

FP8_BLOCK = 128
"""Values that share a scale in the FP8 emulation, where an axis has that many."""

UNEVEN = ("embed/weight", "lm_head/weight")
"""Parameters of which an axis stays whole where the mesh does not divide it: vocabularies have any size, and nothing depends on it."""


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every parameter, or optimizer moment, of a tree; scalars are whole everywhere.

    Args:
      tree: arrays or shapes, the parameters anywhere in it.

    Raises:
      UserError: a parameter has no rule, or its size does not divide.
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, dict(mesh.shape)))


def specs(tree: Any, sizes: Mapping[str, int]) -> Any:
    """As `shardings`, as a tree of `PartitionSpec`, for a mesh of these sizes by axis."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(path, leaf.shape, sizes), tree)


def device_values(tree: Any, sizes: Mapping[str, int]) -> int:
    """How many values of a tree of arrays or shapes each device of a mesh of these sizes holds; shares are equal.

    Raises:
      UserError: as `shardings`.
    """

    def share(leaf: Any, spec: PartitionSpec) -> int:
        names = [name for axis in spec if axis is not None for name in ((axis,) if isinstance(axis, str) else axis)]
        return leaf.size // math.prod(sizes.get(name, 1) for name in names)

    return sum(jax.tree.leaves(jax.tree.map(share, tree, specs(tree, sizes))))


def constrain_params(tree: Any) -> Any:
    """A tree of parameters, moments or gradients being traced, divided by the rules; as it is without a mesh."""
    if not in_mesh():
        return tree
    return jax.tree.map(lambda leaf, spec: constrain(leaf, *spec), tree, specs(tree, dict(jax.sharding.get_abstract_mesh().shape)))


def gathered(layer: Any) -> Any:
    """The weights of one layer being traced, whole along `fsdp` and otherwise divided by the rules; as they are without a mesh.

    To be called where a layer is used, so that no more than a layer is ever whole.
    """

    def gather(path: Any, leaf: Shaped[Array, "*s"]) -> Shaped[Array, "*s"]:
        return constrain(leaf, *(_without_fsdp(axis) for axis in _rule(_names(path))))

    return jax.tree_util.tree_map_with_path(gather, layer) if in_mesh() else layer


def check_heads_and_blocks(sizes: Mapping[str, int], model: Any, formats: Iterable[str]) -> None:
    """Refuses a tensor axis that would cut a head or a quantization block in two.

    Args:
      sizes: of the mesh, by axis.
      model: config of the policy.
      formats: of the experts' weights and inputs.

    Raises:
      UserError: it does.
    """
    tensor = sizes["tensor"]
    for name in ("num_heads", "num_kv_heads"):
        if getattr(model, name) % tensor:
            raise UserError(
                f"mesh.tensor is {tensor}, which does not divide the model's {name}={getattr(model, name)}: a head, and the blocks of its "
                "keys and values, belongs to one device; write a divisor"
            )
    width = model.expert_hidden_size
    blocks = {"bf16": 1, "fp8": min(FP8_BLOCK, width)} | {name: block_format(name).block for name in BLOCK_FORMATS}
    block = max(blocks[block_format_name(name) or name] for name in formats)
    if tensor > 1 and width % (tensor * block):
        raise UserError(
            f"mesh.tensor is {tensor}: the {width} hidden columns of an expert (expert_hidden_size) are not {tensor} shares of whole "
            f"blocks of {block}, and a block belongs to one device; write mesh.tensor=1 and use mesh.expert or mesh.fsdp instead"
        )


def _spec(path: tuple[Any, ...], shape: tuple[int, ...], sizes: Mapping[str, int]) -> PartitionSpec:
    names = _names(path)
    if not shape:
        return PartitionSpec()
    rule = _rule(names)
    axes = ((None,) if "groups" in names else ()) + rule
    kept: list[AxisName] = []
    for axis, size in zip(axes, shape, strict=False):
        shares = 1
        for name in (axis,) if isinstance(axis, str) else axis or ():
            shares *= sizes.get(name, 1)
        if size % shares and not "/".join(names).endswith(UNEVEN):
            given = " and ".join(f"mesh.{name}={sizes[name]}" for name in ((axis,) if isinstance(axis, str) else axis or ()))
            raise UserError(
                f"{given} cannot divide {size}, axis {len(kept)} of {'/'.join(names)} {shape}, into equal shares; write divisors of {size}"
            )
        kept.append(axis if size % shares == 0 else None)
    return PartitionSpec(*kept)


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys of a path that are names, without the numbers of lists and the field in which a variable of NNX keeps its array."""
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    return tuple(key for key in keys if isinstance(key, str) and key != "value")


def _rule(names: tuple[str, ...]) -> tuple[AxisName, ...]:
    for length in (2, 1):
        rule = RULES.get("/".join(names[-length:]))
        if rule is not None:
            return rule
    raise UserError(
        f"parameter {'/'.join(names)} has no sharding rule, so a mesh cannot divide it; add it to trace_jax/sharding/rules.py, "
        "or train on one device"
    )


def _without_fsdp(axis: AxisName) -> AxisName:
    if isinstance(axis, tuple):
        kept = tuple(name for name in axis if name != "fsdp")
        return kept[0] if len(kept) == 1 else kept or None
    return None if axis == "fsdp" else axis
