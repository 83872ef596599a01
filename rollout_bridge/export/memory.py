"""Memory of this process, as the kernel counts it."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def resident_bytes() -> int:
    """Bytes in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Most bytes in memory since the process began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
