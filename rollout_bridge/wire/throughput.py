"""How fast records go through a ring, measured against plain copies of the same bytes: `python -m rollout_bridge.wire.throughput`.

A second process sends; this one receives and checks every byte. The copies go from one array into as many slots as the ring has, in
the sender's process and between its records, so that both meet the same machine: on a shared one their ratio is steadier than either.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollout_bridge.wire.reader import RingReader
from rollout_bridge.wire.record import record_bytes
from rollout_bridge.wire.ring import Ring
from rollout_bridge.wire.writer import RingWriter

_TIMEOUT_S = 60.0
_ROUNDS = 7
"""Rounds of copying and sending in turn; the first one touches the pages and is not counted."""


def measure(*, record_mib: int = 64, slots: int = 4, laps: int = 2) -> dict[str, Any]:
    """Sends `laps` times `slots` records a round and copies as many.

    Args:
      record_mib: size of one record.
      slots: slots of the ring.
      laps: how often each slot is used in a round.

    Returns:
      `ring_gb_per_s` (all data received and checked), `memcpy_gb_per_s` and their ratio `share_of_memcpy`; `sender_cpu_share` and
      `receiver_cpu_share`, the same ratio for the processor time of each side, which tells what the ring costs when other programs keep
      the two from running side by side; the settings and the machine's `load`. Medians over the rounds.

    Raises:
      WireError: no room for the ring, or the other process died.
    """
    arrays = _arrays(record_mib)
    with Ring.create(slots=slots, slot_bytes=record_bytes(arrays)) as ring:
        command = [sys.executable, "-m", __spec__.name, "--send", str(ring.path), str(record_mib), str(slots), str(laps)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender, RingReader(ring.path) as reader:
            receiving = [_seconds(lambda: _receive(reader, slots * laps))[1] for _ in range(_ROUNDS)][1:]
            text, _ = sender.communicate()
    rounds = json.loads(text)[1:]
    size = slots * laps * (record_mib << 20) / 1e9
    return {
        "record_mib": record_mib,
        "slots": slots,
        "in_shared_memory": ring.path.parent == Path("/dev/shm"),
        "memcpy_gb_per_s": round(size / statistics.median(wall for (wall, _), _ in rounds), 2),
        "ring_gb_per_s": round(size / statistics.median(wall for _, (wall, _) in rounds), 2),
        "share_of_memcpy": round(statistics.median(copy[0] / send[0] for copy, send in rounds), 3),
        "sender_cpu_share": round(statistics.median(copy[1] / send[1] for copy, send in rounds), 3),
        "receiver_cpu_share": round(statistics.median(copy[1] / own for (copy, _), own in zip(rounds, receiving, strict=True)), 3),
        "load": round(os.getloadavg()[0], 1),
    }


def _arrays(record_mib: int) -> dict[str, np.ndarray]:
    return {"data": np.random.default_rng(0).integers(0, 256, record_mib << 20, np.uint8)}


def _receive(reader: RingReader, records: int) -> None:
    for _ in range(records):
        with reader.receive(_TIMEOUT_S) as received:
            if received is None:
                raise TimeoutError("the sending process did not send; see its output above")


def _send(path: Path, record_mib: int, slots: int, laps: int) -> None:
    """The other process: (wall, processor) seconds of copies and of sending, one pair of them a round."""
    arrays = _arrays(record_mib)
    source, targets = arrays["data"], np.empty((slots, record_mib << 20), np.uint8)
    times = []
    with RingWriter(path) as writer:

        def copy() -> None:
            for target in [*targets] * laps:
                target[:] = source

        def send() -> None:
            for _ in range(slots * laps):
                writer.send(arrays, _TIMEOUT_S)
            writer.wait_until_read(_TIMEOUT_S)

        for _ in range(_ROUNDS):
            times.append((_seconds(copy), _seconds(send)))
    print(json.dumps(times))


def _seconds(work: Callable[[], None]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def _main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of the ring against memcpy.")
    parser.add_argument("--record-mib", type=int, default=64)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--send", nargs=4, metavar="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send:
        path, *numbers = arguments.send
        _send(Path(path), *map(int, numbers))
    else:
        print(json.dumps(measure(record_mib=arguments.record_mib, slots=arguments.slots)))


if __name__ == "__main__":
    _main()
