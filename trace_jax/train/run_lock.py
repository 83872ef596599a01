"""One program at a time in a run directory."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.files import cannot_write


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Holds a run directory, made if need be; the lock ends with the program, however it ends.

    A second program would repeat steps of the first one and clear its unfinished checkpoint away.

    Raises:
      UserError: another program holds it, or it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / ".lock", "a")
    except OSError as error:
        raise cannot_write(directory, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{directory} is in use by another program; wait for its end, or choose another --out") from error
        yield
