"""``metrics.jsonl``: one JSON object a line, one line a step, readable after a kill at any moment."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trace_jax.errors import UserError
from trace_jax.files import cannot_write, write_atomic


class JsonlWriter:
    """Appends steps to a JSON-lines file.

    Each line is flushed and synced. A process killed inside a write leaves a last line without its newline; opening the file
    cuts that line off. A write that fails (full disk) takes back what it wrote.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        rows, complete_bytes = _scan(self.path)
        self._last_step = rows[-1]["step"] if rows else None
        try:
            # Unbuffered: after a failed write nothing waits in a buffer to be written again.
            self._file = open(self.path, "ab", buffering=0)
            self._file.truncate(complete_bytes)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Appends ``{"step": step, **metrics}``; NaN and infinities, which JSON lacks, become null."""
        if "step" in metrics:
            raise ValueError("'step' is the key of the step number; give the metric another name")
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(
                f"{self.path}: step {step} comes after step {self._last_step}; write all metrics of a step in one call, "
                "and truncate_after(step) when resuming"
            )
        row = {"step": int(step)} | {name: _finite_or_none(value) for name, value in metrics.items()}
        line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
        start = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(start)
            raise cannot_write(self.path, error) from error
        self._last_step = step

    def truncate_after(self, step: int) -> None:
        """Removes the steps after ``step`` (those a resumed run will repeat). Atomic: the old or the new file remains."""
        rows, _ = _scan(self.path)
        kept = [row for row in rows if row["step"] <= step]
        self._last_step = kept[-1]["step"] if kept else None
        if len(kept) == len(rows):
            return
        write_atomic(self.path, ((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in kept))
        self._file.close()
        self._file = open(self.path, "ab", buffering=0)

    def close(self) -> None:
        self._file.close()


def read_metrics(run_dir: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The steps of a run in order, each with ``step`` and its metrics; null becomes NaN.

    Args:
        run_dir: a run directory, or a metrics file. A run that is still being written is fine.

    Raises:
        UserError: if there is no metrics file, or a line of it is not one of ours.
    """
    path = Path(run_dir)
    if path.is_dir():
        path = path / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no metrics here; give the directory of a run, which contains metrics.jsonl")
    rows, _ = _scan(path)
    return [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]


def _scan(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The complete rows and the number of bytes they take. Only the last line may be incomplete."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    complete = data.rfind(b"\n") + 1
    rows = []
    for number, line in enumerate(data[:complete].splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row["step"], int):
                raise TypeError("step")
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f'{path}:{number}: not a metrics line (a JSON object with "step"); remove the line or move the file away'
            ) from error
        rows.append(row)
    return rows, complete


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
