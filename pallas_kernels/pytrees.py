"""Dataclasses of arrays as pytrees."""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax

_Class = TypeVar("_Class", bound=type)


def register_arrays(cls: _Class) -> _Class:
    """Registers a dataclass as a pytree; fields with the metadata `static` belong to its structure. A class decorator.

    As `jax.tree_util.register_dataclass`, but an instance that jax rebuilds does not pass through `__init__`: jax fills it
    with whatever a transformation carries (None, object(), shape structs), and `__init__` is where tests check that the
    arrays have the shapes and dtypes of the annotations.
    """
    fields = dataclasses.fields(cls)
    static = tuple(field.name for field in fields if field.metadata.get("static"))
    arrays = tuple(field.name for field in fields if field.name not in static)
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in arrays)

    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(value, name) for name in arrays), tuple(getattr(value, name) for name in static)

    def flatten_with_keys(value: Any) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, structure = flatten(value)
        return tuple(zip(keys, children, strict=True)), structure

    def unflatten(structure: tuple[Any, ...], children: Iterable[Any]) -> Any:
        value = object.__new__(cls)
        for name, part in zip((*arrays, *static), (*children, *structure), strict=True):
            object.__setattr__(value, name, part)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
