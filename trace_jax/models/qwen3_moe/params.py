"""Names and shapes of Qwen3-MoE weights in Hugging Face checkpoints, both ways.

Ours is a nested dict whose layer weights are stacked along axis 0 (and the experts' along axis 1); Hugging Face has one
tensor per layer, and per expert. Both keep the torch layout `[out, in]`, so mapping is slicing, never a transpose.

transformers 5 holds experts fused in memory and saves them per expert, unless told otherwise; a fused file has
`experts.gate_up_proj` `[E, 2F, D]` (gate first) and `experts.down_proj` `[E, D, F]` in every layer. An older form stores
both transposed, `[E, D, 2F]` and `[E, F, D]`. The two shapes together tell the forms apart for every D and F.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.tensor_files import NamedShapes, TensorFiles, listed

TreePath: TypeAlias = tuple[str | int, ...]
Params: TypeAlias = dict[Any, Any]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Endings of tensors that old files carry and that follow from the config."""


class Entry(NamedTuple):
    """One Hugging Face tensor and its place in our tree.

    Args:
      name: Hugging Face name.
      shape: shape of the tensor.
      path: keys from the root of our tree to the stacked array.
      position: where in that array: (), (layer,) or (layer, expert).
    """

    name: str
    shape: tuple[int, ...]
    path: TreePath
    position: tuple[int, ...]


def key_map(config: Qwen3MoeConfig) -> list[Entry]:
    """Every tensor of a checkpoint in the per-expert layout, in file order; together they cover our tree exactly once."""
    table = (config.vocab_size, config.hidden_size)
    entries = [Entry(EMBED, table, ("embed", "weight"), ())]
    for layer in range(config.num_layers):
        for name, shape, path in _attention_and_norms(config):
            entries.append(Entry(f"model.layers.{layer}.{name}", shape, ("groups", 0, *path), (layer,)))
        for expert in range(config.num_experts):
            for name, shape in _expert(config).items():
                hf_name = f"{_experts_prefix(layer)}.{expert}.{name}_proj.weight"
                entries.append(Entry(hf_name, shape, ("groups", 0, "experts", name), (layer, expert)))
    entries.append(Entry("model.norm.weight", (config.hidden_size,), ("final_norm",), ()))
    if not config.tie_embeddings:
        entries.append(Entry(HEAD, table, ("lm_head", "weight"), ()))
    return entries


def hf_names(config: Qwen3MoeConfig) -> NamedShapes:
    """Names and shapes of a checkpoint in the per-expert layout, in file order."""
    return [(entry.name, entry.shape) for entry in key_map(config)]


def parameter_shapes(config: Qwen3MoeConfig) -> dict[TreePath, tuple[int, ...]]:
    """TreePath -> shape of every array of our tree."""
    stacked = (config.num_layers, config.num_experts)
    return {entry.path: (*stacked[: len(entry.position)], *entry.shape) for entry in key_map(config)}


def from_hf_tensors(config: Qwen3MoeConfig, files: TensorFiles) -> Params:
    """Reads a checkpoint in either expert layout.

    Args:
      config: shape of the model, from the checkpoint's config.json.
      files: the open checkpoint.

    Returns:
      Nested dict of float32 NumPy arrays.

    Raises:
      UserError: a tensor is missing, unknown, given in two layouts, of the wrong shape or type, or not finite.
    """
    fused = [layer for layer in range(config.num_layers) if any(name in files.names for name in _fused_names(layer))]
    in_fused_layer = {(layer, expert) for layer in fused for expert in range(config.num_experts)}
    separate = [entry for entry in key_map(config) if entry.position not in in_fused_layer]
    _check_names(config, files, separate, fused)
    transposed = {layer: _is_transposed(config, files, layer) for layer in fused}

    leaves = {path: np.empty(shape, np.float32) for path, shape in parameter_shapes(config).items()}
    for entry in separate:
        leaves[entry.path][entry.position] = files.read(entry.name)
    for layer in fused:
        _read_fused(config, files, layer, transposed[layer], leaves)
    if config.tie_embeddings and HEAD in files.names and not np.array_equal(files.read(HEAD), leaves["embed", "weight"]):
        raise UserError(
            f"{files.directory}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBED}; "
            "write tie_word_embeddings: false to keep both"
        )
    return _nest(leaves)


def to_hf_tensors(config: Qwen3MoeConfig, params: Params) -> Iterator[tuple[str, Float[np.ndarray, "*_"]]]:
    """The tensors of `hf_names(config)`, in that order, as float32 on the host; fetched one layer at a time.

    Raises:
      UserError: `params` is not the tree of `config`.
    """
    leaves = _flatten(params)
    expected = parameter_shapes(config)
    wrong = sorted(_dotted(path) for path in leaves.keys() | expected.keys() if _shape(leaves.get(path)) != expected.get(path))
    if wrong:
        raise UserError(f"the parameters do not fit the model config: {listed(wrong)}; use the config that the checkpoint was made with")
    return _slices(key_map(config), leaves)


def _slices(entries: list[Entry], leaves: dict[TreePath, Any]) -> Iterator[tuple[str, Float[np.ndarray, "*_"]]]:
    current, on_host = None, {}
    for entry in entries:
        layer, within = entry.position[:1], entry.position[1:]
        if layer != current:
            current, on_host = layer, {}
        if entry.path not in on_host:
            on_host[entry.path] = np.asarray(leaves[entry.path][layer], dtype=np.float32)
        yield entry.name, on_host[entry.path][within]


def _attention_and_norms(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...], TreePath]]:
    """HF name below the layer, shape, and path below our group, of what a layer has besides its experts."""
    width, head = config.hidden_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    for letter, shape in {"q": (query, width), "k": (key, width), "v": (key, width), "o": (width, query)}.items():
        yield f"self_attn.{letter}_proj.weight", shape, ("attention", f"{letter}_proj")
        if config.attention_bias:
            yield f"self_attn.{letter}_proj.bias", shape[:1], ("attention", f"{letter}_bias")
    for letter in "qk":
        yield f"self_attn.{letter}_norm.weight", (head,), ("attention", f"{letter}_norm")
    yield "input_layernorm.weight", (width,), ("input_norm",)
    yield "post_attention_layernorm.weight", (width,), ("post_attention_norm",)
    yield "mlp.gate.weight", (config.num_experts, width), ("router",)


def _expert(config: Qwen3MoeConfig) -> dict[str, tuple[int, int]]:
    width, hidden = config.hidden_size, config.expert_hidden_size
    return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


def _experts_prefix(layer: int) -> str:
    return f"model.layers.{layer}.mlp.experts"


def _fused_names(layer: int) -> tuple[str, str]:
    return f"{_experts_prefix(layer)}.gate_up_proj", f"{_experts_prefix(layer)}.down_proj"


def _check_names(config: Qwen3MoeConfig, files: TensorFiles, separate: list[Entry], fused: list[int]) -> None:
    expected = {entry.name for entry in separate} | {name for layer in fused for name in _fused_names(layer)}
    spare = files.names - expected
    twice = sorted(spare & {entry.name for entry in key_map(config)})
    if twice:
        raise UserError(f"{files.directory} holds experts both fused and one by one: {listed(twice)}; remove one of the two forms")
    allowed = {HEAD} if config.tie_embeddings else set()
    unknown = sorted(name for name in spare - allowed if not name.endswith(IGNORED_SUFFIXES))
    missing = sorted(expected - files.names)
    if missing == [HEAD] and not unknown:
        raise UserError(
            f"{files.directory} lacks {HEAD} and config.json does not say tie_word_embeddings: true; "
            "write that if the head is the embedding, else download the checkpoint again"
        )
    if missing or unknown:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [f"has unknown {listed(unknown)}"] * bool(unknown)
        raise UserError(f"{files.directory} {' and '.join(parts)}; weights and config.json must describe one model: download both again")
    wrong = [f"{e.name} is {files.shape(e.name)}, not {e.shape}" for e in separate if files.shape(e.name) != e.shape]
    if wrong:
        raise UserError(f"{files.directory}: wrong shape: {listed(wrong)}; weights and config.json must describe one model")


def _is_transposed(config: Qwen3MoeConfig, files: TensorFiles, layer: int) -> bool:
    """Whether a fused layer has the older form `[E, in, out]`; 2F = D and F = D cannot both hold, so one form fits at most."""
    experts, hidden, width = config.num_experts, config.expert_hidden_size, config.hidden_size
    names = _fused_names(layer)
    shapes = tuple(files.shape(name) for name in names)
    if shapes == ((experts, 2 * hidden, width), (experts, width, hidden)):
        return False
    if shapes == ((experts, width, 2 * hidden), (experts, hidden, width)):
        return True
    raise UserError(
        f"{files.directory}: wrong shape: {names[0]} is {shapes[0]} and {names[1]} is {shapes[1]}, not {(experts, 2 * hidden, width)} and "
        f"{(experts, width, hidden)} or both transposed; weights and config.json must describe one model"
    )


def _read_fused(config: Qwen3MoeConfig, files: TensorFiles, layer: int, transposed: bool, leaves: dict[TreePath, np.ndarray]) -> None:
    gate_up, down = (files.read(name) for name in _fused_names(layer))
    if transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    hidden = config.expert_hidden_size
    for name, values in {"gate": gate_up[:, :hidden], "up": gate_up[:, hidden:], "down": down}.items():
        leaves["groups", 0, "experts", name][layer] = values


def _nest(leaves: dict[TreePath, np.ndarray]) -> Params:
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def _flatten(tree: Params, path: TreePath = ()) -> dict[TreePath, Any]:
    leaves: dict[TreePath, Any] = {}
    for key, value in tree.items():
        leaves |= _flatten(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return leaves


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return None if leaf is None else tuple(leaf.shape)


def _dotted(path: TreePath) -> str:
    return ".".join(str(key) for key in path)
