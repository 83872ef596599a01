"""What the commands share: exit codes, and results on stdout."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any, TypeVar

from trace_jax.cli.progress import Display, display
from trace_jax.cli.versions import installed_version_problem
from trace_jax.errors import UserError
from trace_jax.files import FULL_DISK, is_full_disk

Result = TypeVar("Result", bound=Mapping[str, Any])

USER_ERROR = 2
FAILURE = 1
BAD_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)


class Interrupted(Exception):
    """Ctrl-C while a command ran."""


def exit_code_of(error: BaseException) -> int:
    """Reports an exception on stderr the way a person needs it.

    Returns:
      2 for what the user can mend (wrong input or usage, a path that cannot be used, full disk, packages that do not fit), the
      code of an exit that was asked for, and 1 with a traceback for everything else.
    """
    if isinstance(error, UserError):
        return _refuse(str(error))
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILURE if error.code else 0
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # usage errors of typer, whichever click it carries
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "trace-jax"
        return _refuse(f"{error.format_message()} See: {where} --help")  # pyright: ignore[reportAttributeAccessIssue]
    if hasattr(error, "exit_code"):  # typer.Exit
        return int(error.exit_code)  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(error, BrokenPipeError):
        # The reader of our output went away; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    if is_full_disk(error):
        full = _caused_by(error, FULL_DISK)
        where = full.filename if full is not None and full.filename else "a file"
        return _refuse(f"no space left on the device while writing {where}; free some space or choose another folder")
    bad = _caused_by(error, BAD_PATH)
    if bad is not None and bad.filename is not None:
        return _refuse(f"{os.fsdecode(bad.filename)}: {bad.strerror}; choose another path, or change its permissions")
    if isinstance(error, KeyboardInterrupt | Interrupted):
        print("interrupted", file=sys.stderr)
        return FAILURE
    if isinstance(error, ImportError | AttributeError) and (problem := installed_version_problem()):
        return _refuse(problem)
    traceback.print_exception(error)
    return FAILURE


def _refuse(message: str) -> int:
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return USER_ERROR


def _caused_by(error: BaseException | None, numbers: Sequence[int]) -> OSError | None:
    """The operating system's error with one of these numbers that this error is or was caused by."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in numbers:
            return error
        error = error.__cause__ or error.__context__
    return None


def quiet_dependencies() -> None:
    """Keeps notices of libraries (Orbax and others log through absl) off the screen; their errors stay."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # what is left of a failed save


def run_and_show(work: Callable[[Display], Result], show: Callable[[Result], None], *, json: bool) -> Result:
    """Does the work of a command with progress on stderr, then prints its result on stdout.

    Args:
      work: gets the display to announce its phases to, and returns the result.
      show: prints the result for a person.
      json: print the result as one JSON object instead.
    """
    with json_output(json) as emit:
        with display() as shown:
            result = work(shown)
        emit(result)
    if not json:
        show(result)
    return result


@contextmanager
def json_output(wanted: bool) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Keeps stdout for one JSON object.

    While the block runs and JSON is wanted, whatever prints to stdout goes to stderr.

    Yields:
      A function that prints the object on the real stdout; it does nothing if JSON is not wanted.
    """
    stdout = sys.stdout

    def emit(value: Mapping[str, Any]) -> None:
        if wanted:
            print(json.dumps(to_json(value), indent=2), file=stdout)

    if not wanted:
        yield emit
        return
    with redirect_stdout(sys.stderr):
        yield emit


def to_json(value: Any) -> Any:
    """A JSON-able copy: NumPy and JAX values become Python ones, NaN and infinities become null, paths text."""
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_json(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    tolist = getattr(value, "tolist", None)  # NumPy and JAX, arrays and scalars
    return str(value) if tolist is None else to_json(tolist())


def split_names(text: str | None) -> list[str] | None:
    """`a,b` as a list; None stays None."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
