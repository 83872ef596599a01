"""Stopping a run from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any


@dataclass
class StopRequest:
    """Set by SIGTERM or SIGINT; the loop stops after the step in progress."""

    asked: bool = False


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Turns the first SIGTERM or SIGINT into a stop after the current step, and says so; the former handlers come back at the end.

    A second Ctrl-C does what it did before. A second SIGTERM changes nothing: who sends one often sends two, to the program
    and to its group (`timeout` does), and who wants more has SIGKILL.
    """
    request = StopRequest()

    former = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handler(signum: int, frame: Any) -> None:
        if request.asked:
            return
        request.asked = True
        signal.signal(signal.SIGINT, former[signal.SIGINT])
        again = "; again to stop at once" if signum == signal.SIGINT else ""
        with suppress(OSError):  # not `print`: the signal may have come inside one
            os.write(2, f"stopping after this step{again}\n".encode())

    try:
        for number in former:
            signal.signal(number, handler)
        yield request
    finally:
        for number, old in former.items():
            signal.signal(number, old)
