"""TensorBoard logger, through tensorboardX (no torch)."""

from collections.abc import Mapping
from pathlib import Path

from trace_jax.errors import UserError


class TensorBoardWriter:
    """Writes numbers as scalars, text as text; None and NaN are left out."""

    def __init__(self, log_dir: Path, after_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise UserError(
                "loggers: tensorboard needs the package tensorboardX; pip install tensorboardX, or remove it from loggers"
            ) from error
        # purge_step hides the steps that the killed run wrote after its last checkpoint.
        purge = None if after_step is None else after_step + 1
        self._writer = SummaryWriter(str(log_dir), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, float | int | bool | str | None]) -> None:
        for name, value in metrics.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            elif value is not None and value == value:
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
