"""What the workers of a verifier print: a few lines reach the console, the rest is dropped."""

from __future__ import annotations

import io
import sys
import threading

SHOWN_LINES = 5
"""Lines of all workers together that are shown; a reward that prints does so for every answer."""

LINE_BYTES = 1000
"""A longer line counts as several."""


class LineLimit:
    """Shows the first `SHOWN_LINES` lines on stderr and says once that there are more.

    Args:
      reward: name of the reward, or an import path.
    """

    def __init__(self, reward: str):
        self._reward = reward
        self._lines = 0
        self._lock = threading.Lock()

    def show(self, line: str) -> None:
        """Shows or drops a line; may be called from any thread."""
        with self._lock:
            self._lines += 1
            if self._lines > SHOWN_LINES + 1:
                return
            more = f"task.reward {self._reward} prints more than {SHOWN_LINES} lines; the others are not shown"
            print(line if self._lines <= SHOWN_LINES else more, file=sys.stderr, flush=True)


class OutputReader(threading.Thread):
    """Reads the stderr of one worker until it ends, so that the worker never waits for a full pipe.

    Args:
      pipe: the worker's stderr, unbuffered; closed by this thread.
      limit: shared by the workers of a verifier.

    Attributes:
      last: the last line that is not blank; after a crash it names the error, and the limit may have dropped it.
    """

    def __init__(self, pipe: io.FileIO, limit: LineLimit):
        super().__init__(name="verifier output", daemon=True)
        self._pipe, self._limit = pipe, limit
        self.last = ""
        self.start()

    def run(self) -> None:
        """Until the worker and all that inherited its stderr have ended."""
        with io.BufferedReader(self._pipe) as lines:
            while line := lines.readline(LINE_BYTES):
                text = line.decode(errors="replace").rstrip()
                self.last = text.strip() or self.last
                self._limit.show(text)
