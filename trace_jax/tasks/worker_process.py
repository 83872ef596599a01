"""The parent's side of one verifier worker: start, talk with a deadline, kill."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from typing import Any, cast

from trace_jax.errors import UserError
from trace_jax.tasks.frames import HEADER, frame
from trace_jax.tasks.verifiers import VerifierSpec
from trace_jax.tasks.worker_output import LineLimit, OutputReader

START_TIMEOUT_S = 120.0

OUTPUT_TIMEOUT_S = 1.0
"""Seconds for the last lines of a worker that ended; a process that it left behind may hold its stderr open for longer."""


class WorkerDied(Exception):
    """The worker process ended by itself."""


class VerifierWorker:
    """One worker process and its pipes; used by one thread at a time. What it prints goes through `limit`."""

    def __init__(self, spec: VerifierSpec, timeout_s: float, limit: LineLimit):
        """Starts the process; `wait_ready` tells when it can serve."""
        warnings = ["-W", "ignore"] if spec.built_in else []
        self.process = subprocess.Popen(
            [sys.executable, "-P", *warnings, "-m", "trace_jax.tasks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        self._output = OutputReader(cast(io.FileIO, self.process.stderr), limit)
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._received = bytearray()
        self._ready = False
        self._hello = (spec, timeout_s)

    def wait_ready(self) -> None:
        """Waits until the verifier is made.

        Raises:
          UserError: the worker refused, or did not come up.
        """
        if self._ready:
            return
        try:
            self.send(pickle.dumps(self._hello), START_TIMEOUT_S)
            state, reason = self.receive(START_TIMEOUT_S)
        except (TimeoutError, WorkerDied) as error:
            self.kill()
            reason = f"{error}: {self._output.last}" if self._output.last else str(error)
            raise UserError(
                f"the verifier's worker process did not start ({reason}); mend task.reward or the Python installation"
            ) from error
        if state != "ready":
            raise UserError(reason)
        self._ready = True

    def send(self, body: bytes, timeout_s: float) -> None:
        """Writes a frame; raises TimeoutError or WorkerDied."""
        data, deadline = memoryview(frame(body)), time.monotonic() + timeout_s
        while data:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                data = data[os.write(self._stdin, data) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._died() from None

    def receive(self, timeout_s: float) -> Any:
        """The next frame's value; raises TimeoutError or WorkerDied."""
        deadline = time.monotonic() + timeout_s
        while True:
            if len(self._received) >= HEADER.size:
                end = HEADER.size + HEADER.unpack_from(self._received)[0]
                if len(self._received) >= end:
                    body = bytes(self._received[HEADER.size : end])
                    del self._received[:end]
                    return pickle.loads(body)
            self._wait(self._stdout, select.POLLIN, deadline)
            part = os.read(self._stdout, 1 << 16)
            if not part:
                raise self._died()
            self._received += part

    def kill(self) -> None:
        """Ends the process, its children and the pipes; may be called twice."""
        if self.process.poll() is None:
            # Only while the process is ours: its number may belong to someone else once it has been waited for.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._output.join(OUTPUT_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    @staticmethod
    def _wait(descriptor: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("no answer in time")

    def _died(self) -> WorkerDied:
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            # The pipe is closed though the process lives: a verifier closed our descriptors.
            self.kill()
            code = self.process.returncode
        return WorkerDied(f"the verifier's worker died with exit code {code}")
