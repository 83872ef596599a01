"""What work of any kind may use to talk to the person at the terminal."""

from __future__ import annotations

import sys
from typing import Protocol, runtime_checkable

from rich.console import Console


@runtime_checkable
class Announce(Protocol):
    """Says what long work does next, and how many of how many phases are done."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None: ...


def unannounced(what: str, done: int = 0, total: int | None = None) -> None:
    """Says nothing: for work that nobody watches."""


def say(line: str) -> None:
    """Tells the person at the console something about the run, from its first process; standard output is for results."""
    from trace_jax.sharding.processes import is_first  # imports jax, which the commands that need no device do without

    if is_first():
        print(line, file=sys.stderr, flush=True)


def result_console() -> Console:
    """A console for the result on stdout: as wide as the terminal, and wide enough for tables when there is none."""
    return Console(width=None if sys.stdout.isatty() else 120)
