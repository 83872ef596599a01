"""Which parameters of a test are part of the quick suite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[str], values: Iterable[str]) -> list[Any]:
    """Parameters of a test, marked slow unless named as quick."""
    quick = tuple(quick)
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
