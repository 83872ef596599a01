"""Who is using a ring: locks on single bytes of its file, which the kernel lets go of when a process ends, however it ends.

They belong to an open file (Linux "open file description" locks), so a writer and a reader in one process exclude each
other like two processes do, and a dead process's number in use by another one misleads nobody. A process made by `fork` shares
its parent's locks until both have ended; one started anew does not.
"""

import errno
import fcntl
import struct

OWNER, WRITER, READER = 0, 1, 2
"""The byte that stands for each role."""

_FLOCK = struct.Struct("hhqqi4x")  # struct flock: l_type, l_whence, l_start, l_len, l_pid


def try_lock(descriptor: int, role: int) -> bool:
    """Takes a role; False if somebody else has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, role))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(descriptor: int, role: int) -> None:
    """Gives a role back."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, role))


def is_held(descriptor: int, role: int) -> bool:
    """Whether somebody else has a role."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, role))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


def _request(kind: int, role: int) -> bytes:
    return _FLOCK.pack(kind, 0, role, 1, 0)
