"""Where a ring lies: the first folder with room for it, memory before disk."""

import errno
import os
import secrets
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from rollout_bridge.wire import layout, locks
from rollout_bridge.wire.errors import WireError

SHARED_MEMORY = Path("/dev/shm")

_PREFIX = "trace-jax-ring-"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BEING_MADE_S = 60.0
"""Age at which a file that is not a ring yet will not become one."""


def default_folders() -> list[Path]:
    """Shared memory, then the folder for temporary files."""
    return [SHARED_MEMORY, Path(tempfile.gettempdir())]


def reserve(size: int, folders: Sequence[Path]) -> tuple[Path, int]:
    """A new file of `size` bytes that only this user can open, owned by the caller, with all its space reserved.

    Rings that crashed programs left in these folders are removed first. Space is asked for before and reserved at once, because
    memory that is missing later kills the program that touches it.

    Returns:
      Its path and an open descriptor.

    Warns:
      UserWarning: it does not lie in the first folder, with the reason.

    Raises:
      WireError: no folder has room.
    """
    reasons = []
    for folder in folders:
        remove_abandoned(folder)
        reason = _no_room(size, folder)
        if reason is None:
            path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
            try:
                descriptor = _make(path, size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise WireError(f"{path}: cannot be made ({error.strerror}); choose another folder") from error
                reason = f"{folder} has no room for the {_mib(size)} of the ring"
            else:
                if reasons:
                    warnings.warn(f"{'; '.join(reasons)}; the ring is a file in {folder}, which is slower: {_REMEDY}", stacklevel=3)
                return path, descriptor
        reasons.append(reason)
    raise WireError(f"{'; '.join(reasons)}: {_REMEDY}")


_REMEDY = "use fewer or smaller slots, or a container with more shared memory (--shm-size)"


def remove_abandoned(folder: Path) -> list[Path]:
    """Deletes the rings in a folder that no living process uses; those of other users stay.

    Returns:
      What was deleted.
    """
    return [path for path in sorted(folder.glob(_PREFIX + "*")) if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        # A file without the magic may be a ring that is being made at this moment.
        new = os.pread(descriptor, len(layout.MAGIC), 0) != layout.MAGIC
        if new and time.time() - os.fstat(descriptor).st_mtime < _BEING_MADE_S:
            return False
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        if any(locks.is_held(descriptor, role) for role in (locks.OWNER, locks.WRITER, locks.READER)):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _no_room(size: int, folder: Path) -> str | None:
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    free = state.f_bavail * state.f_frsize
    return None if free >= size else f"{folder} has {_mib(free)} free and the ring needs {_mib(size)}"


def _make(path: Path, size: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        locks.try_lock(descriptor, locks.OWNER)
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
