"""Waiting for the other process by looking at its counters."""

import threading
import time
from collections.abc import Callable

_FIRST_S, _LONGEST_S = 20e-6, 5e-3
_SHARE = 1 / 8
"""Length of a nap, by the time that has been waited: looking costs little then, and what is there is seen soon."""

_YIELDS = 20
_FENCE = threading.Lock()
_FENCE.acquire()


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `ready` became true in time. Looks once even if the time is zero; sleeps longer the longer it takes."""
    start = time.monotonic()
    looks = 0
    while not ready():
        waited = time.monotonic() - start
        if waited >= timeout_s:
            return False
        looks += 1
        nap = min(max(_SHARE * waited, _FIRST_S), _LONGEST_S) if looks > _YIELDS else 0.0
        time.sleep(min(nap, timeout_s - waited))
    return True


def fence() -> None:
    """What this thread wrote before is visible to others before what it writes afterwards, and the same for reads.

    x86 keeps that order by itself; elsewhere the atomic operations of a lock do.
    """
    _FENCE.release()
    _FENCE.acquire()
