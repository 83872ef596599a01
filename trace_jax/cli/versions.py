"""Which jax and flax fit together. A pair that does not breaks deep inside an import; this names it in one line."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

FLAX_NEEDS_JAX = (
    # flax from, to (exclusive), jax from, to (exclusive)
    ((0, 12, 8), (0, 12, 10), (0, 10, 0), (0, 11, 0)),
    ((0, 12, 10), (0, 12, 12), (0, 11, 0), (0, 13, 0)),
    ((0, 12, 12), (9, 0, 0), (0, 11, 1), (0, 13, 0)),
)
"""Pairs that were seen to import (flax 0.12.8 with jax 0.10.2, 0.12.10 with 0.11.2) or that flax declares."""


def number(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `0.12.8rc1` is (0, 12, 8)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def installed(package: str) -> str | None:
    """Version of an installed distribution, None if it is missing; nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_problem(jax: str | None, flax: str | None) -> str | None:
    """One line that says why these versions cannot work together and what to install; None if they can."""
    if jax is None or flax is None:
        missing = "jax" if jax is None else "flax"
        return f"{missing} is not installed; run: pip install -c constraints.txt -e ."
    if not (0, 10) <= number(jax) < (0, 13):
        return f"jax {jax} is not supported; install jax >= 0.10, < 0.13 (tested: 0.10.2 and 0.11.2)"
    for flax_from, flax_to, jax_from, jax_to in FLAX_NEEDS_JAX:
        if flax_from <= number(flax) < flax_to:
            if jax_from <= number(jax) < jax_to:
                return None
            wanted = "flax 0.12.8" if number(jax) < (0, 11) else "flax 0.12.10"
            return f"flax {flax} does not work with jax {jax}; install {wanted}, or both from constraints.txt"
    return f"flax {flax} is not supported; install flax >= 0.12.8 (0.12.8 for jax 0.10, 0.12.10 or newer for jax 0.11)"


def installed_version_problem() -> str | None:
    """`version_problem` of what is installed here."""
    return version_problem(installed("jax"), installed("flax"))
