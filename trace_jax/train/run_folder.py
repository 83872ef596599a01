"""The folder of a run: which one, whether it may be used, and that one program at a time uses it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.files import cannot_write
from trace_jax.train.read_checkpoint import complete_steps

LOCK = ".lock"


def run_directory(out: Path | None, name: str, *, resume: bool | None) -> Path:
    """The folder of a run: `out`, or `runs/<name>`; it is made when the run starts.

    Args:
      resume: whether a run there is to be continued; None for a command that cannot continue one.

    Raises:
      UserError: as `claimed`.
    """
    directory = out if out is not None else Path("runs") / name
    _check(directory, resume)
    return directory


@contextmanager
def claimed(directory: Path, *, resume: bool | None) -> Iterator[None]:
    """Holds the folder of a run for one program, made if need be; the lock ends with the program, however it ends.

    A second program would repeat steps of the first one and clear its unfinished checkpoint away. A new run that is refused,
    or stopped, before its first checkpoint is complete leaves nothing.

    Args:
      resume: as in `run_directory`.

    Raises:
      UserError: another program holds the folder, it cannot be written, it holds something else than a run to be continued,
        or a run that is not to be.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / LOCK, "a")
    except OSError as error:
        raise cannot_write(directory, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{directory} is in use by another program; wait for its end, or choose another --out") from error
        mine = False
        try:
            _check(directory, resume)
            mine = not resume
            yield
        except UserError:
            if mine and not complete_steps(directory / "checkpoints"):
                _remove(_content(directory))  # it was empty, so all of it comes from this run
            raise
        finally:
            if not _content(directory):
                (directory / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # another program may have put something into a folder above
                    for path in made:
                        path.rmdir()


def _check(directory: Path, resume: bool | None) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose a folder for --out")
    if resume and not (directory / "config.yaml").exists():
        raise UserError(f"{directory}: nothing to resume (no config.yaml); leave --resume out to start a run there")
    if not resume and directory.exists() and _content(directory):
        advice = "choose another --out" if resume is None else "add --resume to continue it, or choose another --out"
        raise UserError(f"{directory} is not empty; {advice}")


def _content(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name != LOCK]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
