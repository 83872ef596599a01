"""Notices that a process of a run is gone, so that the others do not wait for it for ever.

What several processes compute together does not end, or ends with a message about sockets, when one of them is no more. JAX notices
after 100 seconds, and its page of text does not say which process to look at.

1. Every process holds a connection to process 0. The system closes it when the process ends, however it ends; keep-alives show a host
   that is cut off.
2. A process that ends in order says so, with its exit code (`leave`). One that is gone without a word is lost: process 0 tells the others,
   and each prints one line and ends with code 1 (within a second; a host that is cut off, 35 seconds).
3. When a process has ended with an error, the others may be waiting for it: they have `GRACE_S` to end by themselves, then they end as
   above. An error that all of them meet keeps its exit code.

This module imports no jax: the program calls `leave` at its end, whatever it did.
"""

from __future__ import annotations

import atexit
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from trace_jax.errors import UserError

GRACE_S = 10.0
"""What processes have to end by themselves after one of them has ended with an error."""

CONNECT_S = 30.0
"""What process 0 may take to accept a connection."""

KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds without traffic, seconds between two questions, and questions without an answer before a connection counts as closed."""

LAST_S = 0.5
"""How long process 0 stays behind those that it has told to end: without it JAX would end them in its own words."""

LOST, GAVE_UP = -1, 256
"""In place of an exit code: a process ended without a word, or because it does not wait for another one any more."""

Gather = Callable[[Any], list[Any]]
"""The values of all processes, which all call it at the same point."""


class Watch:
    """What one process knows of the others.

    Args:
      index: of this process.
      names: how each process is called in a message.
      links: connections by process: to all others in process 0, elsewhere to process 0.
    """

    def __init__(self, index: int, names: Sequence[str], links: dict[int, socket.socket]):
        self._index, self._names, self._links = index, names, links
        self._changed = threading.Condition()
        self._left: dict[int, int] = {}
        threading.Thread(target=self._run, name="lost processes", daemon=True).start()

    def leave(self, code: int) -> None:
        """Tells the others that this process ends; with an error it does not wait for those that hang, but ends the program.

        Args:
          code: exit code.
        """
        with self._changed:
            if self._index in self._left:
                return
            self._left[self._index] = code
        self._tell(f"{self._index} {code}")
        if code == 0:
            return  # the others end in order too, and JAX waits for them
        with self._changed:
            all_leave = self._changed.wait_for(lambda: len(self._left) == len(self._names), timeout=GRACE_S + 2)
        if not all_leave or GAVE_UP in self._left.values():
            _end(code)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, (process, bytearray()))
            while selector.get_map():
                for key, _ in selector.select():
                    process, unread = key.data
                    try:
                        data = key.fileobj.recv(4096)  # pyright: ignore[reportAttributeAccessIssue]
                    except OSError:
                        data = b""
                    if not data:
                        selector.unregister(key.fileobj)
                        self._closed(process)
                    unread += data
                    while b"\n" in unread:
                        line, _, rest = bytes(unread).partition(b"\n")
                        unread[:] = rest
                        self._told(*map(int, line.split()))

    def _closed(self, process: int) -> None:
        """The connection to a process is no more."""
        if process not in self._left:
            self._told(process, LOST)

    def _told(self, process: int, code: int) -> None:
        """A process has ended: with an exit code, or `LOST`, or it `GAVE_UP`."""
        with self._changed:
            self._left[process] = code
            self._changed.notify_all()
        if self._index == 0:
            self._tell(f"{process} {code}", but=process)
        if code == LOST:
            self._give_up(f"{self._names[process]} is lost, and this one cannot go on without it")
        elif code not in (0, GAVE_UP):
            timer = threading.Timer(GRACE_S, self._abandoned, (process, code))
            timer.daemon = True
            timer.start()

    def _abandoned(self, process: int, code: int) -> None:
        if self._index not in self._left:
            self._give_up(f"{self._names[process]} ended with code {code}, and this one waited for it; its log says why")

    def _give_up(self, reason: str) -> None:
        with suppress(OSError):  # whoever read it may be gone as well
            os.write(2, f"error: {reason}; start all processes again, a run with --resume\n".encode())
        self._tell(f"{self._index} {GAVE_UP}")
        if self._index == 0:
            time.sleep(LAST_S)
        _end(1)

    def _tell(self, line: str, but: int = -1) -> None:
        for process, link in self._links.items():
            if process != but:
                try:
                    link.sendall(f"{line}\n".encode())
                except OSError:
                    pass  # it is gone itself, which its own connection says


_watch: Watch | None = None


def watch(address: str, count: int, index: int, gathered: Gather) -> None:
    """Begins to watch the other processes; all of them call it at the same point.

    Args:
      address: host:port of process 0; another port of the host, which the system chooses, is used.
      count, index: of the processes, and of this one.
      gathered: see `Gather`.

    Raises:
      UserError: a process cannot reach process 0.
    """
    global _watch
    server = _server(count) if index == 0 else None
    own = (f"process {index} ({socket.gethostname()})", None if server is None else (server.getsockname()[1], secrets.token_hex(16)))
    told = gathered(own)
    port, secret = told[0][1]
    links: dict[int, socket.socket] = {}
    problem = None
    if server is None:
        host = address.rpartition(":")[0].strip("[]")
        try:
            links[0] = socket.create_connection((host, port), timeout=CONNECT_S)
            links[0].sendall(f"{secret} {index}\n".encode())
        except OSError as error:
            problem = f"process {index} cannot reach process 0 at {host}, port {port} ({error}); let the hosts of a run reach each other"
    problems = [problem for problem in gathered(problem) if problem is not None]
    if problems:
        raise UserError(problems[0])
    if server is not None:
        with server:
            links = _accepted(server, secret, count - 1)
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    _watch = Watch(index, [name for name, _ in told], links)
    atexit.register(lambda: leave(1 if hasattr(sys, "last_value") else 0))


def leave(code: int) -> None:
    """The program ends with an exit code; does nothing in a program that is the only process of its run."""
    if _watch is not None:
        _watch.leave(code)


def _server(count: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=count)
    return socket.create_server(("", 0), backlog=count)


def _accepted(server: socket.socket, secret: str, count: int) -> dict[int, socket.socket]:
    """The connections of the other processes, all of which have been made; those of strangers are closed."""
    links: dict[int, socket.socket] = {}
    while len(links) < count:
        link, _ = server.accept()
        link.settimeout(CONNECT_S)
        said, _, process = _line(link).partition(" ")
        if said == secret:
            links[int(process)] = link
        else:
            link.close()
    return links


def _line(link: socket.socket) -> str:
    """The first line that comes over a connection, and nothing of what follows it."""
    line = b""
    try:
        while len(line) < 100 and (byte := link.recv(1)) not in (b"", b"\n"):
            line += byte
    except OSError:
        pass
    return line.decode("ascii", "replace")


def _end(code: int) -> None:
    """Ends the program at once: what it would do in order waits for the process that is gone."""
    try:
        sys.stdout.flush()
    finally:  # also where nobody reads any more
        os._exit(code)
