"""Weights of Hugging Face files into our tree and back, by the entries of a family's key map.

transformers 5 holds experts fused in memory and saves them per expert, unless told otherwise; a fused file has `experts.gate_up_proj`
`[E, 2F, D]` (gate first) and `experts.down_proj` `[E, D, F]` in every layer. An older form stores both transposed, `[E, D, 2F]` and
`[E, F, D]`. The two shapes together tell the forms apart for every D and F.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.models.decoder_config import DecoderConfig
from trace_jax.models.key_map import EMBED, HEAD, Entry, TreePath, file_shapes, flatten, nest, parameter_shapes
from trace_jax.models.tensor_files import TensorFiles, listed

Params: TypeAlias = dict[Any, Any]

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Endings of tensors that old files carry and that follow from the config."""

_PER_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


def from_hf_tensors(config: DecoderConfig, entries: Sequence[Entry], files: TensorFiles, ignored_layers: Sequence[int] = ()) -> Params:
    """Reads a checkpoint, in either layout of experts where its names are those of Qwen3-MoE.

    Args:
      config: shape of the model, from the checkpoint's config.json.
      entries: the family's key map.
      files: the open checkpoint.
      ignored_layers: layers of the files that the logits do not depend on (those that predict further tokens).

    Returns:
      Nested dict of float32 NumPy arrays.

    Raises:
      UserError: a tensor is missing, unknown, given in two layouts, of the wrong shape or type, or not finite.
    """
    prefixes = {entry.layer: match[1] for entry in entries if (match := _PER_EXPERT.fullmatch(entry.name)) and entry.layer is not None}
    fused = {layer: prefix for layer, prefix in prefixes.items() if any(name in files.names for name in _fused_names(prefix))}
    separate = [entry for entry in entries if not (entry.layer in fused and entry.is_expert)]
    _check_names(config, files, entries, separate, fused, ignored_layers)
    transposed = {layer: _is_transposed(config, files, prefix) for layer, prefix in fused.items()}

    leaves = {path: np.empty(shape, np.float32) for path, shape in parameter_shapes(entries).items()}
    name, tensor = "", np.empty(0, np.float32)
    for entry in separate:
        if entry.name != name:
            name, tensor = entry.name, files.read(entry.name)
        leaves[entry.path][entry.position] = entry.taken_from(tensor)
    stacked = {entry.layer: entry for entry in entries if entry.is_expert}
    for layer, prefix in fused.items():
        _read_fused(config, files, prefix, transposed[layer], stacked[layer], leaves)
    if config.tie_embeddings and HEAD in files.names and not np.array_equal(files.read(HEAD), leaves["embed", "weight"]):
        raise UserError(
            f"{files.directory}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBED}; "
            "write tie_word_embeddings: false to keep both"
        )
    return nest(leaves)


def to_hf_tensors(entries: Sequence[Entry], params: Params) -> Iterator[tuple[str, Float[np.ndarray, "*_"]]]:
    """The tensors of `file_shapes(entries)`, in that order, as float32 on the host; fetched one layer at a time.

    Raises:
      UserError: `params` is not the tree of the entries.
    """
    leaves = flatten(params)
    expected = parameter_shapes(entries)
    wrong = sorted(_dotted(path) for path in leaves.keys() | expected.keys() if _shape(leaves.get(path)) != expected.get(path))
    if wrong:
        raise UserError(f"the parameters do not fit the model config: {listed(wrong)}; use the config that the checkpoint was made with")
    return _slices(entries, leaves)


def _slices(entries: Sequence[Entry], leaves: dict[TreePath, Any]) -> Iterator[tuple[str, Float[np.ndarray, "*_"]]]:
    shapes = file_shapes(entries)
    current, on_host, tensor = None, {}, None
    for number, entry in enumerate(entries):
        if entry.layer != current:
            current, on_host = entry.layer, {}
        if entry.path not in on_host:
            on_host[entry.path] = np.asarray(leaves[entry.path][entry.position[:1]], dtype=np.float32)
        ours = on_host[entry.path][entry.position[1:]]
        if not entry.part and not entry.transposed:
            yield entry.name, ours
            continue
        tensor = np.empty(shapes[entry.name], np.float32) if tensor is None else tensor
        entry.taken_from(tensor)[...] = ours
        if number + 1 == len(entries) or entries[number + 1].name != entry.name:
            yield entry.name, tensor
            tensor = None


def _fused_names(prefix: str) -> tuple[str, str]:
    return f"{prefix}.gate_up_proj", f"{prefix}.down_proj"


def _check_names(
    config: DecoderConfig,
    files: TensorFiles,
    entries: Sequence[Entry],
    separate: Sequence[Entry],
    fused: dict[int, str],
    ignored_layers: Sequence[int],
) -> None:
    shapes = file_shapes(separate)
    expected = shapes.keys() | {name for prefix in fused.values() for name in _fused_names(prefix)}
    spare = files.names - expected
    twice = sorted(spare & {entry.name for entry in entries})
    if twice:
        raise UserError(f"{files.directory} holds experts both fused and one by one: {listed(twice)}; remove one of the two forms")
    allowed = {HEAD} if config.tie_embeddings else set()
    unused = tuple(f"model.layers.{layer}." for layer in ignored_layers)
    unknown = sorted(name for name in spare - allowed if not name.endswith(IGNORED_SUFFIXES) and not name.startswith(unused))
    missing = sorted(expected - files.names)
    if missing == [HEAD] and not unknown:
        raise UserError(
            f"{files.directory} lacks {HEAD} and config.json does not say tie_word_embeddings: true; "
            "write that if the head is the embedding, else download the checkpoint again"
        )
    if missing or unknown:
        parts = [f"lacks {listed(missing)}"] * bool(missing) + [f"has unknown {listed(unknown)}"] * bool(unknown)
        raise UserError(f"{files.directory} {' and '.join(parts)}; weights and config.json must describe one model: download both again")
    wrong = [f"{name} is {files.shape(name)}, not {shape}" for name, shape in shapes.items() if files.shape(name) != shape]
    if wrong:
        raise UserError(f"{files.directory}: wrong shape: {listed(wrong)}; weights and config.json must describe one model")


def _is_transposed(config: DecoderConfig, files: TensorFiles, prefix: str) -> bool:
    """Whether a fused layer has the older form `[E, in, out]`; 2F = D and F = D cannot both hold, so one form fits at most."""
    experts, hidden, width = config.num_experts, config.expert_hidden_size, config.hidden_size
    names = _fused_names(prefix)
    shapes = tuple(files.shape(name) for name in names)
    if shapes == ((experts, 2 * hidden, width), (experts, width, hidden)):
        return False
    if shapes == ((experts, width, 2 * hidden), (experts, hidden, width)):
        return True
    raise UserError(
        f"{files.directory}: wrong shape: {names[0]} is {shapes[0]} and {names[1]} is {shapes[1]}, not {(experts, 2 * hidden, width)} and "
        f"{(experts, width, hidden)} or both transposed; weights and config.json must describe one model"
    )


def _read_fused(
    config: DecoderConfig, files: TensorFiles, prefix: str, transposed: bool, entry: Entry, leaves: dict[TreePath, np.ndarray]
) -> None:
    """Fills the experts of a layer, of which `entry` is any."""
    gate_up, down = (files.read(name) for name in _fused_names(prefix))
    if transposed:
        gate_up, down = gate_up.swapaxes(1, 2), down.swapaxes(1, 2)
    hidden = config.expert_hidden_size
    for name, values in {"gate": gate_up[:, :hidden], "up": gate_up[:, hidden:], "down": down}.items():
        leaves[(*entry.path[:-1], name)][entry.position[0]] = values


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return None if leaf is None else tuple(leaf.shape)


def _dotted(path: TreePath) -> str:
    return ".".join(str(key) for key in path)
