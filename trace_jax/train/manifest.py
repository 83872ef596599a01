"""The list of a checkpoint's files with size and checksum, which says whether they are what was saved.

The list is written as the last file of a checkpoint, before the checkpoint gets its name, and is looked at before
anything is read: a storage library must not be the first to meet a damaged file.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from trace_jax.files import write_atomic

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Lists every file below `folder` in `folder/manifest.json`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "crc32": _checksum(path)} for path in files}
    write_atomic(folder / MANIFEST, [json.dumps(entries, indent=0).encode()])


def find_damage(folder: Path, part: str) -> str | None:
    """Compares the files below `folder/part` with the list.

    Returns:
      The first file that differs and how, or None when all are as they were saved.
    """
    try:
        entries = json.loads((folder / MANIFEST).read_bytes())
        listed = {name: (entry["size"], entry["crc32"]) for name, entry in entries.items() if name.startswith(f"{part}/")}
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, (size, checksum) in listed.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
        if _checksum(path) != checksum:
            return f"{name} is damaged (its checksum differs)"
    return None if listed else f"{part} is not in {MANIFEST}"


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            value = zlib.crc32(chunk, value)
    return value
