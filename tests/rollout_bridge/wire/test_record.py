"""Records as bytes: any arrays come back, and the checksum finds what goes wrong in memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_bridge.wire.checksum import CHUNK, checksum, copy_with_checksum
from rollout_bridge.wire.errors import WireError
from rollout_bridge.wire.layout import LINE
from rollout_bridge.wire.record import DTYPES, read_record, record_bytes, write_record


@st.composite
def records(draw) -> dict[str, np.ndarray]:
    """Up to four arrays of any dtype that travels, scalars, empty and strided ones among them."""
    names = draw(st.lists(st.sampled_from(("", "a", "layers.0.k", "Schlüssel", "層")), max_size=4, unique=True))
    arrays = {}
    for name in names:
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        bits = np.random.default_rng(draw(st.integers(0, 99))).integers(
            0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8
        )
        array = bits.view(dtype).reshape(shape)
        arrays[name] = array.T if draw(st.booleans()) else array
    return arrays


def aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + size]


@given(arrays=records())
def test_any_arrays_come_back(arrays):
    slot = aligned(record_bytes(arrays) + 7)
    length, total = write_record(arrays, slot)
    assert length == record_bytes(arrays)
    found = read_record(slot[:length], total)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape and found[name].tobytes() == array.tobytes()


def test_bytes_of_a_record_are_those_of_its_arrays_and_little_more():
    rows = {"codes": np.zeros((1000, 64), np.uint8), "scales": np.zeros((1000, 8), np.uint8)}
    assert 72_000 <= record_bytes(rows) < 72_000 + 3 * LINE
    with pytest.raises(WireError, match="does not fit"):
        write_record(rows, aligned(record_bytes(rows) - 1))


@pytest.mark.parametrize("size", (0, 1, 8, 13, CHUNK - 1, CHUNK, CHUNK + 9, 3 * CHUNK))
def test_copying_sums_what_reading_sums(size):
    source, target = np.random.default_rng(size).integers(0, 256, size + 1, np.uint8)[1:], aligned(size)
    assert copy_with_checksum(source, target) == checksum(target) and np.array_equal(source, target)


def test_the_checksum_finds_what_goes_wrong_in_memory():
    data = aligned(3 * CHUNK + 21)
    data[:] = np.random.default_rng(5).integers(0, 256, data.size, np.uint8)
    total = checksum(data)
    for index in (0, 7, CHUNK - 1, CHUNK, data.size - 22, data.size - 1):
        for bit in range(8):
            data[index] ^= 1 << bit
            assert checksum(data) != total
            data[index] ^= 1 << bit
    older = aligned(data.size)
    older[:] = data
    older[CHUNK // 2 : CHUNK] = 0
    assert checksum(older) != total  # a part that is older
    assert checksum(data[:-1]) != total and checksum(data[:-CHUNK]) != total  # cut off
    exchanged = np.concatenate([data[CHUNK : 2 * CHUNK], data[:CHUNK], data[2 * CHUNK :]])
    assert checksum(exchanged) != total
    assert checksum(np.concatenate([data, np.zeros(8, np.uint8)])) != total  # zeros appended
    assert checksum(data) == total


def test_the_wire_needs_numpy_and_the_standard_library_only(environment: dict[str, str]):
    code = (
        "import sys, numpy; before = set(sys.modules); import rollout_bridge.wire; "
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names); "
        "assert new == {'rollout_bridge'}, new; assert 'pickle' not in set(sys.modules) - before"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
