"""Dotted keys: the list of known ones, the nearest to a wrong one, and overlaying nested mappings."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, get_origin

from pydantic import BaseModel

from trace_jax.config.schema import Config


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """Dotted paths of every key, sections included, in the order of the schema."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from known_keys(section, f"{prefix}{name}.")


def unknown_key(values: Mapping[str, Any], model: type[BaseModel] = Config, prefix: str = "") -> str | None:
    """Dotted path of the first key that does not exist; None if all do. Free mappings are not looked into."""
    for name, value in values.items():
        if name not in model.model_fields:
            return prefix + name
        section = model.model_fields[name].annotation
        if not isinstance(value, Mapping) or get_origin(section) is dict:
            continue
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return f"{prefix}{name}.{next(iter(value), '')}"
        found = unknown_key(value, section, f"{prefix}{name}.")
        if found is not None:
            return found
    return None


def nearest_key(path: str) -> str | None:
    """The known key that a wrong one most probably means: same last word elsewhere, else the closest spelling."""
    keys = list(known_keys())
    section, _, leaf = path.rpartition(".")
    same_leaf = [key for key in keys if key.rpartition(".")[2] == leaf]
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    close_sibling = difflib.get_close_matches(path, siblings, n=1, cutoff=0.75)
    close = difflib.get_close_matches(path, keys, n=1, cutoff=0.6)
    leaves = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close_leaf = [leaves[name] for name in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    return next(iter([*close_sibling, *same_leaf, *close, *close_leaf]), None)


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, section by section; a value that is not a mapping replaces what is below it."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = overlay(under, value) if isinstance(under, Mapping) and isinstance(value, Mapping) else value
    return merged


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def value_at(values: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    """Whether a dotted path is set in a nested mapping, and its value."""
    current: Any = values
    for name in path.split("."):
        if not isinstance(current, Mapping) or name not in current:
            return False, None
        current = current[name]
    return True, current
