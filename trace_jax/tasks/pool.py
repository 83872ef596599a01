"""Verifier workers: processes that are killed when a verifier hangs, and replaced.

1. Workers start on first use (or `start`), and each serves one batch's chunk at a time.
2. The parent waits for each verdict at most `timeout_s`; there are no signals, so any thread may call.
3. A late worker is killed with its children: that item's verdict is the error "timeout", the rest of the chunk goes to a new
   worker. A worker that died gives an error in the same way.

Not guaranteed: the order in which items are verified.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from trace_jax.errors import UserError
from trace_jax.tasks.row import Row, Verdict
from trace_jax.tasks.verifiers import VerifierSpec
from trace_jax.tasks.worker import HEADER

Item: TypeAlias = tuple[str, Row]

TIMEOUT = "timeout"
"""The error of a verdict whose verifier was cut off."""

START_TIMEOUT_S = 120.0
CHUNK = 16
"""Items handed to a worker at once: enough to hide the pipe, few enough to keep all workers busy."""


class WorkerDied(Exception):
    """The worker process ended by itself."""


class VerifierWorker:
    """One worker process and its pipes; used by one thread at a time."""

    def __init__(self, spec: VerifierSpec, timeout_s: float):
        """Starts the process; `wait_ready` tells when it can serve."""
        warnings = ["-W", "ignore"] if spec.built_in else []
        self.process = subprocess.Popen(
            [sys.executable, "-P", *warnings, "-m", "trace_jax.tasks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
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
            raise UserError(f"the verifier's worker process did not start ({error}); its messages are on stderr") from error
        if state != "ready":
            raise UserError(reason)
        self._ready = True

    def send(self, body: bytes, timeout_s: float) -> None:
        """Writes a frame; raises TimeoutError or WorkerDied."""
        data, deadline = memoryview(HEADER.pack(len(body)) + body), time.monotonic() + timeout_s
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


class VerifierPool:
    """Up to `workers` worker processes of one verifier.

    Args:
      spec: the verifier.
      timeout_s: seconds per completion.
      workers: at most this many processes; they start when needed.
    """

    def __init__(self, spec: VerifierSpec, timeout_s: float, workers: int):
        self.spec, self.timeout_s, self.workers = spec, timeout_s, workers
        self._alive: set[VerifierWorker] = set()
        self._free: list[VerifierWorker] = []
        self._slots = threading.BoundedSemaphore(workers)
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _kill_all, self._alive)

    def start(self) -> None:
        """Starts one worker and waits for it, so that a missing package shows before the first batch.

        Raises:
          UserError: the verifier cannot be made.
        """
        self._release(self._acquire())

    def verify(self, items: Sequence[Item]) -> list[Verdict]:
        """A verdict per (completion, row), in order. Thread-safe.

        Raises:
          UserError: the verifier cannot be made.
        """
        size = max(1, min(CHUNK, -(-len(items) // self.workers)))
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        if len(chunks) <= 1:
            return self._verify_chunk(items) if items else []
        with ThreadPoolExecutor(min(self.workers, len(chunks)), "verify") as executor:
            return [verdict for verdicts in executor.map(self._verify_chunk, chunks) for verdict in verdicts]

    def close(self) -> None:
        """Kills all workers; the next use starts new ones. Not while another thread is in `verify`."""
        with self._lock:
            self._free.clear()
            _kill_all(self._alive)

    def _verify_chunk(self, items: Sequence[Item]) -> list[Verdict]:
        try:
            pickle.dumps(list(items))
        except Exception as error:
            # A row's meta may hold anything; find out which row it is.
            if len(items) == 1:
                return [Verdict.failed(f"the row cannot be sent to the verifier ({type(error).__name__}: {error})")]
            return [verdict for item in items for verdict in self._verify_chunk([item])]
        verdicts: list[Verdict] = []
        while len(verdicts) < len(items):
            worker = self._acquire()
            try:
                worker.send(pickle.dumps(list(items[len(verdicts) :])), self.timeout_s)
                while len(verdicts) < len(items):
                    verdicts.append(worker.receive(self.timeout_s))
            except TimeoutError:
                self._discard(worker)
                verdicts.append(Verdict.failed(TIMEOUT))
            except WorkerDied as error:
                self._discard(worker)
                verdicts.append(Verdict.failed(str(error)))
            except BaseException:
                self._discard(worker)
                raise
            else:
                self._release(worker)
        return verdicts

    def _acquire(self) -> VerifierWorker:
        self._slots.acquire()
        try:
            with self._lock:
                worker = self._free.pop() if self._free else None
            if worker is None or worker.process.poll() is not None:
                # A worker that died while idle has failed nobody: just replace it.
                if worker is not None:
                    self._drop(worker)
                worker = VerifierWorker(self.spec, self.timeout_s)
                with self._lock:
                    self._alive.add(worker)
            try:
                worker.wait_ready()
            except BaseException:
                self._drop(worker)
                raise
            return worker
        except BaseException:
            self._slots.release()
            raise

    def _release(self, worker: VerifierWorker) -> None:
        with self._lock:
            self._free.append(worker)
        self._slots.release()

    def _discard(self, worker: VerifierWorker) -> None:
        self._drop(worker)
        self._slots.release()

    def _drop(self, worker: VerifierWorker) -> None:
        with self._lock:
            self._alive.discard(worker)
        worker.kill()


def _kill_all(workers: set[VerifierWorker]) -> None:
    while workers:
        workers.pop().kill()
