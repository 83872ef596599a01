"""Weights of Hugging Face files into our tree and back, by the entries of a family's key map.

transformers 5 holds experts fused in memory and saves them per expert, unless told otherwise; a fused file has `experts.gate_up_proj`
`[E, 2F, D]` (gate first) and `experts.down_proj` `[E, D, F]` in every layer. An older form stores both transposed, `[E, D, 2F]` and
`[E, F, D]`. The two shapes together tell the forms apart for every D and F.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.models.decoder_config import DecoderConfig
from trace_jax.models.key_map import EMBED, HEAD, Entry, TreePath, file_shapes, flatten, nest, parameter_shapes
from trace_jax.models.tensor_files import listed

Params: TypeAlias = dict[Any, Any]

IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Endings of tensors that old files carry and that follow from the config."""

_PER_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


@runtime_checkable
class Source(Protocol):
    """What tensors are read from: `TensorFiles`, or another view of such files."""

    @property
    def directory(self) -> Path:
        """Where the files lie."""
        ...

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """One tensor as float32; raises UserError if it is damaged."""
        ...


def entries_in(files: Source, config: DecoderConfig, entries: Sequence[Entry], ignored_layers: Sequence[int] = ()) -> list[Entry]:
    """The entries as the files hold them: where names are those of Qwen3-MoE, experts one by one or fused.

    Args:
      files: the open checkpoint.
      config: shape of the model, from the checkpoint's config.json.
      entries: the family's key map.
      ignored_layers: layers of the files that the logits do not depend on (those that predict further tokens).

    Raises:
      UserError: a tensor is missing, unknown, given in two layouts or of the wrong shape, or a head that is said to be tied differs.
    """
    prefixes = {entry.layer: match[1] for entry in entries if (match := _PER_EXPERT.fullmatch(entry.name)) and entry.layer is not None}
    fused = {layer: prefix for layer, prefix in prefixes.items() if any(name in files.names for name in _fused_names(prefix))}
    separate = [entry for entry in entries if not (entry.layer in fused and entry.is_expert)]
    _check_names(config, files, entries, separate, fused, ignored_layers)
    if config.tie_embeddings and HEAD in files.names and not np.array_equal(files.read(HEAD), files.read(EMBED)):
        raise UserError(
            f"{files.directory}: config.json says tie_word_embeddings, but {HEAD} differs from {EMBED}; "
            "write tie_word_embeddings: false to keep both"
        )
    stacked = {entry.layer: entry for entry in entries if entry.is_expert}
    return separate + [entry for layer, prefix in fused.items() for entry in _fused_entries(config, files, prefix, stacked[layer])]


def pieces(files: Source, entries: Sequence[Entry]) -> Iterator[tuple[TreePath, tuple[int, ...], Float[np.ndarray, "*shape"]]]:
    """Path in our tree, indices of its leading axes, and float32 values, for each of `entries_in`; one tensor in memory at a time.

    Raises:
      UserError: a tensor is of the wrong type or not finite.
    """
    name, tensor = "", np.empty(0, np.float32)
    for entry in entries:
        if entry.name != name:
            name, tensor = entry.name, files.read(entry.name)
        yield entry.path, entry.position, entry.taken_from(tensor)


def from_hf_tensors(files: Source, entries: Sequence[Entry], shapes: Mapping[TreePath, tuple[int, ...]]) -> Params:
    """All tensors of `entries_in` as a nested dict of float32 NumPy arrays.

    Args:
      shapes: of every array, by its path.

    Raises:
      UserError: as `pieces`.
    """
    leaves = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for path, position, values in pieces(files, entries):
        leaves[path][position] = values
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
    files: Source,
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


def _fused_entries(config: DecoderConfig, files: Source, prefix: str, expert: Entry) -> Iterator[Entry]:
    """The experts of a layer, of which `expert` is any, as parts of two tensors.

    The older form is `[E, in, out]`; 2F = D and F = D cannot both hold, so one form fits at most.
    """
    experts, hidden, width = config.num_experts, config.expert_hidden_size, config.hidden_size
    names = _fused_names(prefix)
    shapes = tuple(files.shape(name) for name in names)
    transposed = shapes == ((experts, width, 2 * hidden), (experts, hidden, width))
    if not transposed and shapes != ((experts, 2 * hidden, width), (experts, width, hidden)):
        raise UserError(
            f"{files.directory}: wrong shape: {names[0]} is {shapes[0]} and {names[1]} is {shapes[1]}, not "
            f"{(experts, 2 * hidden, width)} and {(experts, width, hidden)} or both transposed; weights and config.json must describe "
            "one model"
        )
    whole, path, place = slice(None), expert.path[:-1], expert.position[:1]
    for part, rows in {"gate": slice(0, hidden), "up": slice(hidden, 2 * hidden)}.items():
        index = (whole, whole, rows) if transposed else (whole, rows)
        yield Entry(names[0], (experts, hidden, width), (*path, part), place, expert.layer, index, transposed)
    yield Entry(names[1], (experts, width, hidden), (*path, "down"), place, expert.layer, (), transposed)


def _shape(leaf: Any) -> tuple[int, ...] | None:
    return None if leaf is None else tuple(leaf.shape)


def _dotted(path: TreePath) -> str:
    return ".".join(str(key) for key in path)
