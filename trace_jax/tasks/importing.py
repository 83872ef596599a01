"""Objects by import path, "package.module:name"."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
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
        raise UserError(f"{key} {path!r}: importing {module_name} failed ({type(error).__name__}: {error})") from error
    for part in name.split("."):
        if not hasattr(target, part):
            raise UserError(f"{key} {path!r}: {module_name} has no {name!r}")
        target = getattr(target, part)
    if not callable(target):
        raise UserError(f"{key} {path!r} is a {type(target).__name__}, not a function")
    return target
