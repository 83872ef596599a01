"""Reads the records of one update from a ring."""

from collections.abc import Callable

from rollout_bridge.vllm_plugin.weights.errors import WeightsRefused
from rollout_bridge.vllm_plugin.weights.staging import StagedUpdate
from rollout_bridge.wire import CorruptSlot, RingReader, WireError
from rollout_bridge.wire.weight_records import HEADER, read_header


def receive_update(reader: RingReader, version: int, timeout_s: float, stage: Callable[[], StagedUpdate]) -> StagedUpdate:
    """A whole, flawless update.

    Records of another version, and those before the first one of this version, are the rest of an update that was broken off; they
    are dropped. After something wrong the rest of the update is read and dropped, so that the next one finds an empty ring.

    Args:
      timeout_s: how long the trainer may take to the next record.
      stage: makes an empty place for an update.

    Raises:
      WeightsRefused: something is wrong with it; the line names the tensor.
    """
    staged = stage()
    next_number = 0
    while True:
        try:
            with reader.receive(timeout_s) as received:
                if received is None:
                    raise _refused(version, staged.problem or f"the trainer sent nothing for {timeout_s:g} s")
                if HEADER not in received.arrays:
                    staged.refuse("a record is no part of an update; give the path of the weights' ring")
                    continue
                header = read_header(received.arrays)
                if header.version != version or (header.number and not next_number):
                    continue
                if header.number == 0:
                    staged, next_number = stage(), 0
                if header.number != next_number:
                    staged.refuse(f"record {header.number} came where {next_number} was next")
                next_number = header.number + 1
                for name, piece in header.pieces.items():
                    staged.take(name, piece, received.arrays[name])
        except CorruptSlot as error:
            staged.refuse(str(error))
            next_number += 1
            continue
        except WireError as error:
            raise _refused(version, str(error)) from error
        if header.end is not None:
            staged.finish(*header.end)
            if staged.problem:
                raise _refused(version, staged.problem)
            return staged


def _refused(version: int, problem: str) -> WeightsRefused:
    return WeightsRefused(f"weights of version {version} refused, those in use stay: {problem}")
