"""The index file of a guidance cache: which data file holds which samples, oldest use first.

The index is a convenience: every data file says itself what it holds. A damaged or missing index is rebuilt from them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.rollout.trajectories import Trajectories

INDEX_NAME = "index.json"
INDEX_PROTOCOL = 1
_DATA_NAME = re.compile(r"batch-(\d+)\.safetensors")


@dataclasses.dataclass(eq=False)
class Entry:
    """One batch of samples, stored and evicted as a whole.

    Attributes:
        name: file name in the cache folder.
        nbytes: size of the file, or of its content if the cache lives in memory.
        samples: live sample ids -> sequence index in the batch; replaced samples are no longer listed.
        trajectories: the batch, None until it has been read and checked.
    """

    name: str
    nbytes: int
    samples: dict[int, int]
    trajectories: Trajectories | None = None


@dataclasses.dataclass(frozen=True)
class Index:
    """Content of the index file."""

    layout: str | None
    budget_bytes: int
    next_serial: int
    entries: Sequence[Entry]


def data_files(directory: Path) -> dict[str, int]:
    """Names and sizes of the data files of a cache folder; nothing if there is no folder."""
    if not directory.is_dir():
        return {}
    return {path.name: path.stat().st_size for path in directory.iterdir() if _DATA_NAME.fullmatch(path.name)}


def serial_of(name: str) -> int:
    """Running number in the name of a data file; a larger one was written later."""
    match = _DATA_NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is not the name of a data file")
    return int(match[1])


def layout_hash(record: GuidanceRecord) -> str:
    """Identifies the form of a record: kind and, per site, layers, shape and format. Records of one form can be joined."""
    sites = [
        (name, site.format, site.block, site.size, site.layer_ids.tolist(), list(site.lead), site.multiplier is not None)
        for name, site in record.sites.items()
    ]
    return hashlib.blake2b(json.dumps([record.kind, sites]).encode(), digest_size=16).hexdigest()


def write_index(directory: Path, index: Index) -> None:
    """Write the index atomically."""
    entries = [{"name": e.name, "nbytes": e.nbytes, "samples": list(e.samples.items())} for e in index.entries]
    content = {
        "protocol": INDEX_PROTOCOL,
        "layout": index.layout,
        "budget_bytes": index.budget_bytes,
        "next_serial": index.next_serial,
        "entries": entries,
    }
    text = json.dumps({"content": content, "checksum": _checksum(content)})
    write_atomic(directory / INDEX_NAME, [text.encode()])


def read_index(directory: Path) -> Index | None:
    """The index of a cache folder, None if it is missing or damaged.

    Raises:
        UserError: the index belongs to another protocol version.
        OSError: it cannot be read now.
    """
    path = directory / INDEX_NAME
    try:
        stored = json.loads(path.read_bytes())
        content = stored["content"]
        if stored["checksum"] != _checksum(content):
            return None
        protocol = content["protocol"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    if protocol != INDEX_PROTOCOL:
        raise UserError(f"{path} has cache protocol {protocol}, this version reads {INDEX_PROTOCOL}; generate the cache again")
    entries = [Entry(e["name"], e["nbytes"], {sample: sequence for sample, sequence in e["samples"]}) for e in content["entries"]]
    return Index(content["layout"], content["budget_bytes"], content["next_serial"], entries)


def _checksum(content: object) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
