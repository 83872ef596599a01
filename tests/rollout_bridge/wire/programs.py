"""Programs that the ring's tests start, and what they send: each record can be recomputed from its number."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

ROWS = 4096


def record(number: int) -> dict[str, np.ndarray]:
    """Arrays of several dtypes that differ from record to record, in contents and shape."""
    rng = np.random.default_rng(number)
    return {
        "tokens": rng.integers(0, 1 << 31, size=ROWS + number % 3, dtype=np.int32),
        "codes": rng.integers(0, 256, size=(ROWS, 2, 5), dtype=np.uint8),
        "logprobs": rng.normal(size=(2, ROWS)).astype(np.float32),
        "valid": rng.integers(0, 2, size=13).astype(bool),
        "scalar": np.full((), 0xFEED_FACE_0000_0000 + number, np.uint64),
    }


PREAMBLE = """
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from rollout_bridge.wire import *
from tests.rollout_bridge.wire.programs import record
path = Path({path!r})
"""


@contextmanager
def running(body: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python program that knows the ring's path and `record`, with its output in a pipe; it ends with the block at the latest."""
    code = PREAMBLE.format(path=str(path), root=str(Path(__file__).parents[3])) + body
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], line: str) -> None:
    """Waits until a program has said something."""
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    assert found == line, f"expected {line!r} and got {found!r}"


def same(found: dict[str, np.ndarray], number: int) -> bool:
    """Whether a record has arrived as it was sent: names in order, dtypes, shapes and values."""
    expected = record(number)
    return list(found) == list(expected) and all(
        found[name].dtype == array.dtype and found[name].shape == array.shape and np.array_equal(found[name], array)
        for name, array in expected.items()
    )
