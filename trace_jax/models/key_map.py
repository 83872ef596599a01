"""Names and shapes of weights in Hugging Face checkpoints, and where they stand in our tree.

Ours is a nested dict whose layer weights are stacked along axis 0 (and the experts' along axis 1); Hugging Face has one tensor per layer,
and mostly per expert. Both keep the torch layout `[out, in]`, so mapping is slicing; the families whose files hold a weight the other way
round, or two in one tensor, say so in the entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Shaped

from trace_jax.models.decoder_config import DecoderConfig

TreePath: TypeAlias = tuple[str | int, ...]

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

FLOAT32_LEAVES = ("router_correction",)
"""Last keys of parameters that engines and files keep in float32: they only rank experts, and in BF16 ranks would change."""


class Entry(NamedTuple):
    """One Hugging Face tensor, or a part of one, and its place in our tree.

    Args:
      name: Hugging Face name.
      shape: shape of our part.
      path: keys from the root of our tree to the stacked array.
      position: where in that array: (), (index in the stack,) or (index in the stack, expert).
      layer: global decoder layer id; None outside the layers.
      part: which part of the tensor, as an index into it; () for all of it.
      transposed: whether the last two axes of that part stand the other way round in the file.
    """

    name: str
    shape: tuple[int, ...]
    path: TreePath
    position: tuple[int, ...] = ()
    layer: int | None = None
    part: tuple[slice, ...] = ()
    transposed: bool = False

    def taken_from(self, tensor: Shaped[np.ndarray, "*file"]) -> Shaped[np.ndarray, "*shape"]:
        """Our part of the file's tensor, as a view; writing into it writes into the tensor."""
        part = tensor[self.part]
        return part.swapaxes(-1, -2) if self.transposed else part

    @property
    def is_expert(self) -> bool:
        """Whether it belongs to the weights of a routed expert, or of all of a layer."""
        return len(self.path) > 1 and self.path[-2] == "experts"


class LayerTensor(NamedTuple):
    """A tensor of one layer: its name and path below the layer; the other fields as in `Entry`."""

    name: str
    shape: tuple[int, ...]
    path: TreePath
    expert: int | None = None
    part: tuple[slice, ...] = ()
    transposed: bool = False


def decoder_entries(config: DecoderConfig, of_layer: Callable[[str], Iterable[LayerTensor]]) -> list[Entry]:
    """Every tensor of a checkpoint, in file order; together they cover our tree exactly once.

    Args:
      of_layer: the tensors of a layer of a kind.
    """
    table = (config.vocab_size, config.hidden_size)
    entries = [Entry(EMBED, table, ("embed", "weight"))]
    places = {layer: (stack, index) for stack in config.stacks for index, layer in enumerate(stack.layer_ids)}
    tensors = {kind: list(of_layer(kind)) for kind in {stack.kind for stack in config.stacks}}
    for layer in range(config.num_layers):
        stack, index = places[layer]
        for tensor in tensors[stack.kind]:
            position = (index,) if tensor.expert is None else (index, tensor.expert)
            name, path = f"model.layers.{layer}.{tensor.name}", (*stack.path, *tensor.path)
            entries.append(Entry(name, tensor.shape, path, position, layer, tensor.part, tensor.transposed))
    entries.append(Entry("model.norm.weight", (config.hidden_size,), ("final_norm",)))
    if not config.tie_embeddings:
        entries.append(Entry(HEAD, table, ("lm_head", "weight")))
    return entries


def attention_tensors(
    config: DecoderConfig, norms: tuple[int, int] | None = None, biases: str = "", gated: bool = False
) -> Iterator[LayerTensor]:
    """The tensors of `modules.Attention`, without sinks."""
    width, head = config.hidden_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    for letter, shape in {"q": (query * (1 + gated), width), "k": (key, width), "v": (key, width), "o": (width, query)}.items():
        yield LayerTensor(f"self_attn.{letter}_proj.weight", shape, ("attention", f"{letter}_proj"))
        if letter in biases:
            yield LayerTensor(f"self_attn.{letter}_proj.bias", shape[:1], ("attention", f"{letter}_bias"))
    for letter, size in zip("qk", norms or (), strict=False):
        yield LayerTensor(f"self_attn.{letter}_norm.weight", (size,), ("attention", f"{letter}_norm"))


def layer_norm_tensors(config: DecoderConfig) -> Iterator[LayerTensor]:
    """The norms before attention and before the feed-forward network."""
    yield LayerTensor("input_layernorm.weight", (config.hidden_size,), ("input_norm",))
    yield LayerTensor("post_attention_layernorm.weight", (config.hidden_size,), ("post_attention_norm",))


def mlp_tensors(config: DecoderConfig, hidden_size: int, name: str = "mlp", path: str = "mlp") -> Iterator[LayerTensor]:
    """The tensors of `modules.Mlp`."""
    for part, shape in gated_shapes(config.hidden_size, hidden_size).items():
        yield LayerTensor(f"{name}.{part}_proj.weight", shape, (path, part))


def expert_tensors(
    config: DecoderConfig,
    name: str = "mlp.experts.{expert}.{part}.weight",
    parts: Mapping[str, str] = MappingProxyType({"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
) -> Iterator[LayerTensor]:
    """The tensors of `modules.Experts`, one expert after the other.

    Args:
      name: with `{expert}` and `{part}`.
      parts: what the files call the three matrices.
    """
    for expert in range(config.num_experts):
        for part, shape in gated_shapes(config.hidden_size, config.expert_hidden_size).items():
            yield LayerTensor(name.format(expert=expert, part=parts[part]), shape, ("experts", part), expert)


def gated_shapes(width: int, hidden: int) -> dict[str, tuple[int, int]]:
    """Shapes of the three matrices of a gated network."""
    return {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


def parameter_shapes(entries: Iterable[Entry]) -> dict[TreePath, tuple[int, ...]]:
    """Path -> shape of every array of our tree."""
    counts: dict[TreePath, list[int]] = {}
    shapes: dict[TreePath, tuple[int, ...]] = {}
    for entry in entries:
        found = counts.setdefault(entry.path, [0] * len(entry.position))
        counts[entry.path] = [max(count, index + 1) for count, index in zip(found, entry.position, strict=True)]
        shapes[entry.path] = entry.shape
    return {path: (*counts[path], *shape) for path, shape in shapes.items()}


def file_shapes(entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the files, in file order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        shape = entry.shape[:-2] + entry.shape[:-3:-1] if entry.transposed else entry.shape
        part = entry.part + (slice(None),) * (len(shape) - len(entry.part))
        whole = [_whole(size, index) for size, index in zip(shape, part, strict=True)]
        known = shapes.get(entry.name, (0,) * len(whole))
        shapes[entry.name] = tuple(max(pair) for pair in zip(known, whole, strict=True))
    return shapes


def _whole(size: int, index: slice) -> int:
    """Entries that an axis of the file has up to the end of a part of `size` entries."""
    start, step = index.start or 0, index.step or 1
    return start + size if step == 1 else size * step


def nest(leaves: dict[TreePath, Any]) -> dict[Any, Any]:
    """Paths and leaves as a nested dict."""
    tree: dict[Any, Any] = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def flatten(tree: dict[Any, Any], path: TreePath = ()) -> dict[TreePath, Any]:
    """The reverse of `nest`."""
    leaves: dict[TreePath, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value}
    return leaves
