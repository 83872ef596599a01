"""A small ring in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from rollout_bridge.wire import Ring, record_bytes
from tests.rollout_bridge.wire.programs import record


@pytest.fixture
def ring(tmp_path: Path) -> Generator[Ring, None, None]:
    """Three slots that hold the test records."""
    with Ring.create(slots=3, slot_bytes=max(record_bytes(record(n)) for n in range(3)), folders=[tmp_path]) as ring:
        yield ring
