"""Files that are complete or absent, also after a crash."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from trace_jax.errors import UserError

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and an exhausted quota."""


def write_atomic(path: Path, chunks: Iterable[bytes | memoryview], *, parents: bool = False) -> None:
    """Write a file so that it is either complete under its name or absent; an older file stays until the new one is whole.

    Args:
        path: target; the temporary file lies in the same folder and is removed on any failure.
        chunks: the content; an iterator is consumed while writing.
        parents: whether missing folders above `path` are made.

    Raises:
        UserError: the folder does not exist, is not writable or is full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush_to_disk(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error is, or was caused by, a full disk or an exhausted quota; storage libraries only say so in their text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            return True
        if "No space left" in str(error) or "Disk quota" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def cannot_write(path: Path, error: OSError) -> UserError:
    """The user's line for a write that failed."""
    return UserError(f"{path}: cannot be written ({error.strerror or error}); free space or choose another folder")


def require_writable(path: Path) -> None:
    """Refuses an output that cannot be written before the work instead of after it.

    Raises:
      UserError: the folder itself, or else the nearest one above that exists, is a file or not writable.
    """
    path = path.absolute()
    folder = path if path.is_dir() else next(parent for parent in path.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: {folder} is not a folder that you may write to; choose another")


def flush_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Raises:
        OSError: the path does not exist or the disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
