"""The verifier's worker process: `python -m trace_jax.tasks.worker`, started and killed by `pool.py`.

1. The first frame on stdin says which verifier to make and the timeout; the answer is ready or refused.
2. Each further frame is a list of (completion, row); one verdict frame is written per item, in order.
3. End of stdin ends the process. So does the death of the parent, which a thread watches; and if the interpreter is stuck in C
   code, so does a kernel timer that fires some seconds after the parent's own timeout would have killed us. SIGTERM does nothing:
   who preempts a job may send one to every process, and the parent still needs its step verified.

What verifiers print goes to stderr, line by line. No jax in here. No module of the package may import this one: Python warns
when the module that `-m` runs is loaded already.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time

from trace_jax.errors import UserError
from trace_jax.tasks.frames import read_frame, write_frame
from trace_jax.tasks.row import Verdict
from trace_jax.tasks.verifiers import make_verifier

ORPHAN_GRACE_S = 2.0
"""Seconds past the timeout after which the kernel ends a worker that nobody killed."""

MEMORY_LIMIT_BYTES = 4 << 30
"""Address space of built-in verifiers: an answer like 9^9^9^9 must not take the machine's memory."""


def main() -> None:
    """Serves until the parent is gone."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs that a verifier starts would inherit
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    first = read_frame(requests)
    if first is None:
        return
    spec, timeout_s = pickle.loads(first)
    if spec.built_in:
        _limit_memory()
    try:
        verifier = make_verifier(spec)
    except UserError as error:
        write_frame(replies, ("refused", str(error)))
        return
    write_frame(replies, ("ready", None))
    while (body := read_frame(requests)) is not None:
        for completion, row in pickle.loads(body):
            signal.setitimer(signal.ITIMER_REAL, timeout_s + ORPHAN_GRACE_S)
            try:
                verdict = verifier(completion, row)
            except Exception as error:
                # Whatever a verifier trips over is its error, never a wrong answer.
                verdict = Verdict.failed(f"{type(error).__name__}: {error}"[:500])
            signal.setitimer(signal.ITIMER_REAL, 0)
            write_frame(replies, verdict)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def _limit_memory() -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


if __name__ == "__main__":
    main()
