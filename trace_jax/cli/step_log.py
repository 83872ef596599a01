"""What a person sees while a run goes on: one line a step on stderr, and a bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trace_jax.cli.common import progress, stderr_console


@contextmanager
def step_log(description: str, total: int) -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """Shows the metrics of each step.

    Args:
      description: what the bar counts.
      total: number of steps.

    Yields:
      The function to call after each step, with its number and metrics.
    """
    from trace_jax.metrics.console import ConsoleWriter

    console = stderr_console()
    writer = ConsoleWriter(console)
    with progress(description, total, console) as advance:

        def report(step: int, metrics: dict[str, Any]) -> None:
            writer.write(step, metrics)
            advance(step)

        yield report
