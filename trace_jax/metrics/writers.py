"""Where metrics go: ``metrics.jsonl`` of the run directory, and the chosen loggers.

The JSON-lines file is the record: one object a step, written and synced before ``write`` returns. The other loggers are views.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import JsonlWriter

Value: TypeAlias = float | int | bool | str | None


@runtime_checkable
class Writer(Protocol):
    """What a logger offers."""

    def write(self, step: int, metrics: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """Writes each step to the JSON-lines file and then to every logger."""

    def __init__(self, record: JsonlWriter, views: Sequence[Writer]) -> None:
        self._record = record
        self._views = views

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the metrics of one step.

        Args:
            step: must be larger than the last step in the file; all metrics of a step go into one call.
            metrics: scalars (Python, NumPy or JAX), text or None. NaN and infinities become null in the file.

        Raises:
            ValueError: if the step is not larger than the last one, or a value is neither scalar nor text.
            UserError: if the file cannot be written.
        """
        values = {name: _plain(name, value) for name, value in metrics.items()}
        self._record.write(step, values)
        for view in self._views:
            view.write(step, values)

    def close(self) -> None:
        self._record.close()
        for view in self._views:
            view.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_writers(
    run_dir: str | os.PathLike[str],
    loggers: Sequence[str],
    *,
    after_step: int | None = None,
) -> MetricsLog:
    """Opens the metrics of a run, new or resumed.

    Args:
        run_dir: the run directory; made if absent.
        loggers: ``tensorboard``, or none. ``metrics.jsonl`` is always written.
        after_step: for a resumed run, the step of the restored checkpoint; later steps in the file are removed first, so
            that none is there twice. None keeps what is there.

    Raises:
        UserError: for an unknown logger, or one whose package is missing.
    """
    path = Path(run_dir)
    path.mkdir(parents=True, exist_ok=True)
    views: list[Writer] = []
    for name in loggers:
        if name != "tensorboard":
            raise UserError(f"loggers: {name!r} is unknown; write tensorboard")
        views.append(_tensorboard(path, after_step))
    record = JsonlWriter(path / "metrics.jsonl")
    if after_step is not None:
        record.truncate_after(after_step)
    return MetricsLog(record, views)


def _tensorboard(run_dir: Path, after_step: int | None) -> Writer:
    from trace_jax.metrics.tensorboard import TensorBoardWriter

    return TensorBoardWriter(run_dir / "tensorboard", after_step)


def _plain(name: str, value: Any) -> Value:
    """A JSON value: numbers from NumPy and JAX become Python's."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "fiub" and array.dtype.name != "bfloat16":
        raise ValueError(f"metric {name!r} must be a scalar or text, got {type(value).__name__} of shape {array.shape}")
    if array.dtype.kind == "b":
        return bool(array)
    return int(array) if array.dtype.kind in "iu" else float(array)
