"""Two real processes and a ring: order, wrap-around, back-pressure, and either side killed at the worst moment."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from rollout_bridge.wire import Ring, RingClosed, RingFull, RingReader, RingWriter, WireError
from tests.rollout_bridge.wire.programs import record, running, same, wait_for_line

TIMEOUT_S = 60.0


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(TIMEOUT_S)


SENDS_20 = """
with RingWriter(path) as writer:
    for number in range(20):
        assert writer.send(record(number), 60.0) == number
"""


def test_records_arrive_in_order_and_around_the_ring(ring: Ring):
    """20 records through 3 slots, so the writer waits for the reader and every slot is used again and again."""
    with running(SENDS_20, ring.path) as writer, RingReader(ring.path) as reader:
        for number in range(20):
            with reader.receive(TIMEOUT_S) as received:
                assert received is not None and received.number == number and same(received.arrays, number)
        assert writer.wait(TIMEOUT_S) == 0
        with pytest.raises(RingClosed, match="all its records have been received"), reader.receive(TIMEOUT_S):
            pass


KILLED_IN_A_SLOT = """
import rollout_bridge.wire.record as module
writer = RingWriter(path)
writer.send(record(0), 1.0)
copy = module.copy_with_checksum
def copy_then_stop(source, target):
    total = copy(source, target)
    print("in a slot", flush=True)
    time.sleep(600)
    return total
module.copy_with_checksum = copy_then_stop
writer.send(record(1), 1.0)
"""


def test_a_writer_killed_in_a_slot_leaves_no_torn_record(ring: Ring):
    with running(KILLED_IN_A_SLOT, ring.path) as writer:
        wait_for_line(writer, "in a slot")
        kill(writer)
    assert record(1)["tokens"].tobytes() in ring.path.read_bytes()  # half of it is there, and nobody gets it
    with RingReader(ring.path) as reader:
        with reader.receive(TIMEOUT_S) as received:
            assert received is not None and same(received.arrays, 0)
        with pytest.raises(WireError, match="the writer has died; restart the worker"), reader.receive(TIMEOUT_S):
            pass
        with RingWriter(ring.path) as second:  # goes on behind the last whole record
            assert second.sent == 1 and second.send(record(1), 1.0) == 1
            with reader.receive(TIMEOUT_S) as received:
                assert received is not None and received.number == 1 and same(received.arrays, 1)


KILLED_WITH_A_RECORD = """
reader = RingReader(path)
with reader.receive(60.0) as received:
    print("has", received.number, flush=True)
    time.sleep(600)
"""


def test_what_a_killed_reader_held_comes_again(ring: Ring):
    with RingWriter(ring.path) as writer:
        for number in range(3):
            writer.send(record(number), 1.0)
        with running(KILLED_WITH_A_RECORD, ring.path) as first:
            wait_for_line(first, "has 0")
            with pytest.raises(RingFull, match="the reader is too slow"):
                writer.send(record(3), 0.0)
            kill(first)
        with pytest.raises(RingFull, match="the reader has died; restart the trainer's side"):
            writer.send(record(3), 0.0)
        with RingReader(ring.path) as second:
            for number in range(3):
                with second.receive(TIMEOUT_S) as received:
                    assert received is not None and received.number == number and same(received.arrays, number)


USES_A_RING = """
ring = Ring.create(slots=2, slot_bytes=64, folders=[path])
writer, reader = RingWriter(ring.path), RingReader(ring.path)
print("up", flush=True)
time.sleep(600)
"""


def test_both_sides_and_the_owner_killed_leave_nothing_behind(tmp_path: Path):
    """The next owner in the same folder deletes the ring, and no ring that anybody uses."""
    with running(USES_A_RING, tmp_path) as process:
        wait_for_line(process, "up")
        (abandoned,) = tmp_path.iterdir()
        with Ring.create(slots=2, slot_bytes=64, folders=[tmp_path]):
            assert abandoned.exists()
        kill(process)
    assert abandoned.exists()
    with Ring.create(slots=2, slot_bytes=64, folders=[tmp_path]) as ring:
        assert list(tmp_path.iterdir()) == [ring.path]
    assert not list(tmp_path.iterdir())


OWNS_A_RING = """
ring = Ring.create(slots=2, slot_bytes=64, folders=[path])
print("up", flush=True)
time.sleep(600)
"""


def test_a_worker_that_outlives_the_owner_removes_the_ring(tmp_path: Path):
    with running(OWNS_A_RING, tmp_path) as owner:
        wait_for_line(owner, "up")
        (path,) = tmp_path.iterdir()
        with RingWriter(path):
            kill(owner)
            assert path.exists()
    assert not path.exists()
