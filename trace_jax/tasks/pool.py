"""Verifier workers: processes that are killed when a verifier hangs, and replaced.

1. Workers start on first use (or `start`), and each serves one batch's chunk at a time.
2. The parent waits for each verdict at most `timeout_s`; there are no signals, so any thread may call.
3. A late worker is killed with its children: that item's verdict is the error "timeout", the rest of the chunk goes to a new
   worker. A worker that died gives an error in the same way.

Not guaranteed: the order in which items are verified.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from trace_jax.tasks.row import TIMEOUT, Row, Verdict
from trace_jax.tasks.verifiers import VerifierSpec
from trace_jax.tasks.worker_output import LineLimit
from trace_jax.tasks.worker_process import VerifierWorker, WorkerDied

Item: TypeAlias = tuple[str, Row]

CHUNK = 16
"""Items handed to a worker at once: enough to hide the pipe, few enough to keep all workers busy."""


class VerifierPool:
    """Up to `workers` worker processes of one verifier.

    Args:
      spec: the verifier.
      timeout_s: seconds per completion.
      workers: at most this many processes; they start when needed.
    """

    def __init__(self, spec: VerifierSpec, timeout_s: float, workers: int):
        self.spec, self.timeout_s, self.workers = spec, timeout_s, workers
        self._output = LineLimit(spec.name)
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
                worker = VerifierWorker(self.spec, self.timeout_s, self._output)
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
