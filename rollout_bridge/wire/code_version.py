"""Which code a process runs, so that two that exchange arrays can tell whether it is the same."""

import functools
import hashlib
from pathlib import Path

SHARED = ("wire", "vllm_plugin")
"""Folders of this package that both processes run."""


@functools.cache
def code_checksum(package: Path = Path(__file__).parent.parent) -> int:
    """64-bit checksum over names and contents of the Python files that both sides share.

    Args:
      package: the folder that holds them; a copy for a worker elsewhere has the same checksum.
    """
    digest = hashlib.blake2b(digest_size=8)
    for folder in SHARED:
        for path in sorted((package / folder).rglob("*.py")):
            text = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(text)}\n".encode() + text)
    return int.from_bytes(digest.digest(), "little")
