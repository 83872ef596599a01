"""The folder of a run: which one, whether it may be used, that one program at a time uses it, and what is written there.

`open_run` is all that `train` and `sft` have in common; each of them adds its start and its loop.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trace_jax.config import Config, dump
from trace_jax.errors import UserError
from trace_jax.files import cannot_write, write_atomic
from trace_jax.metrics.writers import MetricsLog, open_writers
from trace_jax.rollout.storage import write_jsonl
from trace_jax.sharding.processes import gathered, is_first, on_first, require_agreement
from trace_jax.terminal import say
from trace_jax.train.checkpoint import Checkpoints
from trace_jax.train.resume import remove_later
from trace_jax.train.stop import StopRequest, stop_on_signal

Report = Callable[[int, dict[str, Any]], None]
"""Called after each step with its number and metrics."""

LOCK = ".lock"

MARKER = "config.yaml"
"""The file by which a folder is known for a run that can be continued."""


def run_directory(out: Path | None, name: str, *, resume: bool | None, marker: str = MARKER) -> Path:
    """The folder of a run: `out`, or `runs/<name>`; it is made when the run starts.

    Args:
      resume: whether a run there is to be continued; None for a command that cannot continue one.
      marker: the file by which a folder is known for something that can be continued.

    Raises:
      UserError: as `claimed`.
    """
    directory = out if out is not None else Path("runs") / name
    on_first(lambda: _check(directory, resume, marker))
    return directory


class Ended(NamedTuple):
    """How a run ended: the metrics of its last step (empty if there was none), and whether a signal stopped it."""

    metrics: dict[str, Any]
    stopped: bool


@dataclass
class OpenRun:
    """A run whose folder this program holds.

    Args:
      config, directory: of the run.
      checkpoints: those of the folder.
      stop: set by a signal; looked at between two steps.
    """

    config: Config
    directory: Path
    checkpoints: Checkpoints
    stop: StopRequest
    _report: Report
    _closing: ExitStack
    _log: MetricsLog | None = None

    def stopping(self) -> bool:
        """Whether a signal has asked this process, or another one of the run, to stop; all processes ask at the same point."""
        self.stop.asked = any(gathered(self.stop.asked))
        return self.stop.asked

    def latest(self) -> int | None:
        """Step of the last complete checkpoint, the same in all processes; None when there is none."""
        return gathered(self.checkpoints.latest())[0]

    def begin(self, after: int | None = None) -> None:
        """Writes the config and opens the metrics: everything is checked, and from here on the folder is a run.

        Of several processes only the first writes; checkpoints are the exception, of which each writes its part.

        Args:
          after: step of the checkpoint that a resumed run goes on from; what came later is removed. None starts a new run.
        """
        on_first(lambda: self._open(after))

    def _open(self, after: int | None) -> None:
        if after is not None:
            self.checkpoints.remove_unfinished()
            remove_later(self.directory, after)
            after = after or -1  # step 0 is evaluated again when a run resumes from it, so its row goes too
        write_atomic(self.directory / "config.yaml", [dump(self.config).encode()])
        log = open_writers(self.directory, list(self.config.loggers), after_step=after)
        self._log = self._closing.enter_context(closing(log))

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Writes the row of a step and reports it; the run has begun."""

        def write() -> None:
            assert self._log is not None
            self._log.write(step, metrics)
            self._report(step, metrics)

        on_first(write)

    def write_rollouts(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Writes the answers of a step."""

        def write() -> None:
            (self.directory / "rollouts").mkdir(exist_ok=True)
            write_jsonl(self.directory / "rollouts" / f"step_{step:06d}.jsonl", rows)

        on_first(write)


@contextmanager
def open_run(config: Config, directory: Path, *, resume: bool | None, report: Report | None) -> Iterator[OpenRun]:
    """Holds the folder of a run, turns signals into a stop after the step in progress, and says at the end what a stopped run left.

    The save under way is complete, and the metrics are closed, before the folder is released.

    Args:
      resume: as in `run_directory`.
      report: called with every row of metrics.

    Raises:
      UserError: as `claimed`.
    """
    with stop_on_signal() as stop:
        checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep)
        with ExitStack() as folder:
            on_first(lambda: folder.enter_context(claimed(directory, resume=resume)))
            require_agreement("the config", dump(config))
            with closing(checkpoints), ExitStack() as logs:
                yield OpenRun(config, directory, checkpoints, stop, report or (lambda step, metrics: None), logs)
        if stop.asked and is_first():
            last = checkpoints.latest()
            remedy = "" if resume is None else ", go on with --resume"
            say("stopped before anything was written" if last is None else f"stopped; step {last} is saved{remedy}")


@contextmanager
def claimed(directory: Path, *, resume: bool | None, marker: str = MARKER) -> Iterator[None]:
    """Holds the folder of a run for one program, made if need be; the lock ends with the program, however it ends.

    A second program would repeat steps of the first one and clear its unfinished checkpoint away. A new run that is refused,
    or stopped, before its first checkpoint is complete leaves nothing.

    Args:
      resume, marker: as in `run_directory`.

    Raises:
      UserError: another program holds the folder, it cannot be written, it holds something else than a run to be continued,
        or a run that is not to be.
    """
    made = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = open(directory / LOCK, "a")
    except OSError as error:
        raise cannot_write(directory, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"{directory} is in use by another program; wait for its end, or choose another --out") from error
        mine = False
        try:
            _check(directory, resume, marker)
            mine = not resume
            yield
        except UserError:
            if mine and not _has_checkpoint(directory):
                _remove(_content(directory))  # it was empty, so all of it comes from this run
            raise
        finally:
            if not _content(directory):
                (directory / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # another program may have put something into a folder above
                    for path in made:
                        path.rmdir()


def _check(directory: Path, resume: bool | None, marker: str) -> None:
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose a folder for --out")
    if resume and not (directory / marker).exists():
        raise UserError(f"{directory}: nothing to resume (no {marker}); leave --resume out to start a run there")
    if not resume and directory.exists() and _content(directory):
        advice = "choose another --out" if resume is None else "add --resume to continue it, or choose another --out"
        raise UserError(f"{directory} is not empty; {advice}")


def _has_checkpoint(directory: Path) -> bool:
    """Whether a complete checkpoint lies in a folder, at any depth: that of a comparison has one per run."""
    return any(path.name.isdigit() for path in directory.rglob("checkpoints/*"))


def _content(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.name != LOCK]


def _remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
