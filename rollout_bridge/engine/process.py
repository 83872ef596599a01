"""A worker in a process of its own: started, greeted, watched and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_bridge.engine.errors import WorkerDied
from rollout_bridge.vllm_plugin.serve import PROTOCOL
from rollout_bridge.vllm_plugin.serve.channel import Channel, ChannelClosed, Message
from rollout_bridge.wire import code_checksum
from trace_jax.errors import UserError

WORKER_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine and, with one worker, its hooks in the process itself
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked worker would keep the trainer's socket open
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # what is captured is known of the first model runner
    "TRITON_INTERPRET": "0",  # a trainer on CPU may have it, and vLLM's kernels on a GPU do not run under it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # everything is in the model's folder
    "PYTHONFAULTHANDLER": "1",
    "PYTHONUNBUFFERED": "1",
}
MODULE = "rollout_bridge.vllm_plugin.serve"
ENDS_IN_S = 10.0
"""What a worker may take to end once asked to."""


@dataclass(frozen=True)
class WorkerCommand:
    """How workers are started.

    Args:
      command: program and arguments; `--fd N` is appended.
      folder: worker folder, the working directory and the first entry of PYTHONPATH.
      log: file to which the worker's output is appended.
      start_timeout_s: what it may take until its model is loaded.
      send_timeout_s: what it may take to make room for a message.
    """

    command: Sequence[str]
    folder: Path
    log: Path
    start_timeout_s: float
    send_timeout_s: float


def vllm_command(python: str) -> list[str]:
    """The command of a real worker. A path stays as it is but absolute: a link into a virtual environment must not be resolved."""
    return [os.path.abspath(python) if os.sep in python else python, "-m", MODULE]


class ProcessLink:
    """Implements `Link`. The constructor returns when the model is loaded.

    Args:
      how: the command.
      start: the `start` message.

    Raises:
      UserError: the interpreter is missing, has no vLLM or one that is not supported, runs other code than the trainer, the model does
        not load, or not in time.
    """

    def __init__(self, how: WorkerCommand, start: Message):
        self._how = how
        self._failure: str | None = None
        self._process, self._channel = _start(how)
        try:
            self._greet(self._await("hello"))
            self.send(start)
            self.ready = self._await("ready")
        except BaseException as error:
            self._process.kill()
            self.close()
            if isinstance(error, WorkerDied):
                raise UserError(f"the rollout worker of {how.command[0]} did not start: {error}") from None
            raise

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def send(self, message: Message) -> None:
        """Gives the worker a message."""
        try:
            self._channel.send(message, self._how.send_timeout_s)
        except TimeoutError as error:
            self.kill(str(error))
            raise WorkerDied(self._end()) from None
        except ChannelClosed:
            raise WorkerDied(self._end()) from None

    def receive(self, timeout_s: float) -> Message | None:
        """The worker's next message."""
        try:
            message = self._channel.receive(timeout_s)
        except ChannelClosed:
            raise WorkerDied(self._end()) from None
        except ValueError as error:
            self.kill(str(error))
            raise WorkerDied(self._end()) from None
        if message is not None and message["type"] == "failed":
            self._failure = message["message"]
            return None
        return message

    def kill(self, reason: str) -> None:
        """Ends the worker at once."""
        self._failure = reason
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Lets the worker end in order, or else kills it."""
        try:
            if self._process.poll() is None:
                self._channel.send({"type": "close"}, ENDS_IN_S)
                self._process.wait(ENDS_IN_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def _await(self, kind: str) -> Message:
        how = self._how
        deadline = time.monotonic() + how.start_timeout_s
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if message is not None and message["type"] == kind:
                return message
        raise UserError(
            f"the rollout worker of {how.command[0]} was not ready after {how.start_timeout_s:g} s; see {how.log}, "
            "or raise rollout.vllm.start_timeout_s"
        )

    def _greet(self, hello: Message) -> None:
        if (hello["protocol"], hello["code"]) != (PROTOCOL, code_checksum()):
            raise UserError(
                f"the rollout worker of {self._how.command[0]} runs another version of rollout_bridge than the trainer; remove the copy "
                "that is installed in its environment (python -m pip uninstall trace-jax)"
            )

    def _end(self) -> str:
        """How the worker ended, on one line."""
        try:
            code = self._process.wait(ENDS_IN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        reason = self._failure or ("" if code < 0 else _last_line(self._how.log))
        return f"{reason} ({how}; see {self._how.log})" if reason else f"{how}; see {self._how.log}"


def _start(how: WorkerCommand) -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(part for part in (str(how.folder), os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | WORKER_ENVIRONMENT | {"PYTHONPATH": path}
    try:
        with open(how.log, "ab") as log, theirs:
            process = subprocess.Popen(
                [*how.command, "--fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=how.folder,
                env=environment,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the trainer, which ends the step and then the worker
            )
    except OSError as error:
        ours.close()
        raise UserError(
            f"rollout.vllm.python: {how.command[0]} cannot be run ({error.strerror}); write the Python of an environment that has vLLM"
        ) from None
    return process, Channel(ours)


def _last_line(log: Path) -> str:
    """The last line that a program left in its log: of a Python traceback, the error."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it left no word"
