"""Where the tensors of an update belong in vLLM's model: its loader takes some by name, the experts' go into stacked parameters."""

import re
from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(?:(\w+_proj)\.)?(\w+)")
_STACKS = {"gate_proj": (("w13", "w1"),), "up_proj": (("w13", "w3"),), "down_proj": (("w2", "w2"),), None: (("w13", "w1"), ("w13", "w3"))}
"""Projection, or None for what gate and up have in common -> vLLM's stacks and its names for their parts."""


class ExpertTarget(NamedTuple):
    """A part of one of vLLM's parameters, all experts of a layer: gate is w1 and up w3 of w13, down is w2."""

    layer: int
    parameter: str
    part: str


def expert_targets(name: str) -> tuple[ExpertTarget, ...]:
    """Where a stacked tensor goes; nothing for a tensor outside the experts."""
    found = _EXPERTS.fullmatch(name)
    if found is None:
        return ()
    layer, projection, what = found.groups()
    return tuple(ExpertTarget(int(layer), f"{stack}_{what}", part) for stack, part in _STACKS[projection])


@runtime_checkable
class Tensors(Protocol):
    """Named tensors that can be taken out one by one; a dict is one."""

    def pop(self, name: str, /) -> Tensor:
        """Takes a tensor out."""
        ...

    def __iter__(self) -> Iterator[str]: ...

    def __len__(self) -> int: ...


def plain_tensors(tensors: Tensors, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Takes the tensors outside the experts out of `tensors`, one by one, under the names of vLLM's loader.

    A tied head is loaded as well: vLLM may keep a packed copy of it.
    """
    for name in [name for name in tensors if not expert_targets(name)]:
        tensor = tensors.pop(name)
        yield name, tensor
        if name == EMBEDDING and tied:
            yield HEAD, tensor
