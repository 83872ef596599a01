"""Functions by import path, "package.module:name", and the names a person may have meant."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from trace_jax.errors import UserError


def import_callable(path: str, key: str) -> Callable[..., Any]:
    """The callable at an import path; modules in the current directory are found too, after all installed ones.

    Args:
      path: "package.module:name".
      key: config key, for messages.

    Raises:
      UserError: malformed path, module that cannot be imported, missing or uncallable name.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise UserError(f"{key} {path!r} is not an import path; write package.module:name")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:
        # A user's module may fail in any way while it is imported.
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        remedy = "write package.module:name of a module that is installed or in the current directory" if missing else "mend the module"
        raise UserError(f"{key} {path!r}: importing {module_name} failed ({type(error).__name__}: {error}); {remedy}") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise UserError(f"{key} {path!r}: {module_name} has no {name!r}{nearest(name, dir(target))}; write {module_name}:FUNCTION")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(f"{key} {path!r} is a {type(target).__name__}, not a function; write {module_name}:FUNCTION")
    return target


def nearest(name: str, known: Iterable[str]) -> str:
    """`; the nearest is 'x'`: the name that shares most words and letters, or nothing when none shares a word or half of the letters."""
    words = set(name.lower().split("_")) - {""}

    def closeness(other: str) -> float:
        return len(words & set(other.lower().split("_"))) + difflib.SequenceMatcher(None, other.lower(), name.lower()).ratio()

    best = max(known, key=closeness, default="")
    return f"; the nearest is {best!r}" if closeness(best) >= 0.5 else ""
