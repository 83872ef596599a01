"""Waiting for the other process by looking at its counters."""

import threading
import time
from collections.abc import Callable

_FIRST_S, _LONGEST_S = 20e-6, 1e-3
_YIELDS = 20
_FENCE = threading.Lock()
_FENCE.acquire()


def wait_until(ready: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `ready` became true in time. Looks once even if the time is zero; sleeps longer the longer it takes."""
    deadline = time.monotonic() + timeout_s
    pause = 0.0
    looks = 0
    while not ready():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        looks += 1
        if looks > _YIELDS:
            pause = min(max(2 * pause, _FIRST_S), _LONGEST_S)
    return True


def fence() -> None:
    """What this thread wrote before is visible to others before what it writes afterwards, and the same for reads.

    x86 keeps that order by itself; elsewhere the atomic operations of a lock do.
    """
    _FENCE.release()
    _FENCE.acquire()
