"""Which layers: the small grammar `all | last_half | last:N | first:N | [ids]`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeAlias

from trace_jax.errors import UserError

LayerSpec: TypeAlias = str | tuple[int, ...]
"""A word of the grammar, or global layer ids."""

GRAMMAR = "all, last_half, last:N, first:N or a list of layer ids"


def parse_layers(value: Any) -> LayerSpec:
    """Checks the form of a specification without knowing the number of layers.

    Returns:
      The word as it is, or the ids in ascending order.

    Raises:
      ValueError: it is not of the grammar.
    """
    if isinstance(value, str) and (value in ("all", "last_half") or re.fullmatch(r"(last|first):[1-9][0-9]*", value)):
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
            raise ValueError("layer ids are whole numbers, 0 for the first layer")
        if not value or len(set(value)) != len(value):
            raise ValueError("write each layer id once, and at least one")
        return tuple(sorted(value))
    raise ValueError(f"write {GRAMMAR}")


def resolve_layers(spec: LayerSpec | Sequence[int], num_layers: int, key: str = "guidance.layers") -> tuple[int, ...]:
    """Global layer ids, ascending, of a specification.

    Args:
      spec: `all`; `last_half` (ids >= L // 2); `last:N`; `first:N`; or ids.
      num_layers: L.
      key: what the user wrote it for, named in errors.

    Raises:
      UserError: the specification is not of the grammar, or asks for layers that the model does not have.
    """
    try:
        spec = parse_layers(spec)
    except ValueError as error:
        raise UserError(f"{key} is {spec!r}; {error}") from None
    if not isinstance(spec, str):
        chosen = spec
    elif spec == "all":
        chosen = tuple(range(num_layers))
    elif spec == "last_half":
        chosen = tuple(range(num_layers // 2, num_layers))
    else:
        word, count = spec.split(":")
        chosen = tuple(range(int(count))) if word == "first" else tuple(range(num_layers - int(count), num_layers))
    if chosen[0] < 0 or chosen[-1] >= num_layers:
        shown = spec if isinstance(spec, str) else list(spec)
        raise UserError(f"{key} is {shown}, but the model has {num_layers} layers; write ids 0 to {num_layers - 1} or fewer layers")
    return chosen
