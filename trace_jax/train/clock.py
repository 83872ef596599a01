"""Wall time of the parts of a step."""

from __future__ import annotations

import time
from collections.abc import Callable

PARTS = ("checkpoint", "rollout", "reward", "audit", "train", "sync", "evaluate")
"""In the order of a row of metrics; `checkpoint` is the save after the step before."""


class Clock:
    """Wall time of the parts of a step, in seconds; what does not happen takes none.

    Args:
      now: seconds of a clock that never goes back.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now = now
        self._start = self._last = now()
        self.laps: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to `name`."""
        current = self._now()
        self.laps[name] += current - self._last
        self._last = current

    def metrics(self) -> dict[str, float]:
        """`time/<part>` of every part, and `time/step`, everything since the start."""
        return {f"time/{name}": seconds for name, seconds in self.laps.items()} | {"time/step": self._now() - self._start}
