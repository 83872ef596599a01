"""What a person sees on stderr while a command works: a bar on a terminal, one plain line a phase elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


class Display:
    """The bar, or the lines, of one command."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console, self._bar = console, bar
        self._task = bar.add_task("starting", total=None)

    def announce(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Shows the phase that begins; an `Announce`."""
        self._bar.update(self._task, description=what, completed=done, total=total)
        if not self._console.is_terminal:
            count = "" if total is None else f" ({done + 1} of {total})"
            self._console.print(f"{what}{count} ...", markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Moves the bar; where there is none, nothing is said."""
        self._bar.update(self._task, description=what, completed=done, total=total)

    def steps(self, what: str, total: int) -> Callable[[int, dict[str, Any]], None]:
        """Counts steps, with a line of metrics for each.

        Args:
          what: what is counted.
          total: number of steps.

        Returns:
          The function to call after each step, with its number and metrics.
        """
        from trace_jax.metrics.console import ConsoleWriter

        writer = ConsoleWriter(self._console)
        self.announce(f"{what}: reading and compiling before the first of {total} steps")

        def report(step: int, metrics: dict[str, Any]) -> None:
            writer.write(step, metrics)
            self._bar.update(self._task, description=what, completed=step, total=total)

        return report


@contextmanager
def display() -> Iterator[Display]:
    """The display of a command; its bar is gone when the command's result is printed."""
    console = Console(stderr=True)
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        yield Display(console, bar)
