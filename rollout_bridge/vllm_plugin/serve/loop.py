"""The worker's life: hello, start, then messages and steps in turn until the trainer is gone."""

from __future__ import annotations

import os
import platform
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any

from rollout_bridge.vllm_plugin.serve import PROTOCOL
from rollout_bridge.vllm_plugin.serve.channel import Channel, ChannelClosed, Message
from rollout_bridge.vllm_plugin.serve.generator import Generator
from rollout_bridge.vllm_plugin.serve.server import Server, one_line
from rollout_bridge.wire.code_version import code_checksum

Build = Callable[[Message], Generator]
"""From the `start` message to what generates."""


def hello() -> dict[str, Any]:
    """The first message: what both sides must have in common."""
    return {"type": "hello", "protocol": PROTOCOL, "code": code_checksum(), "python": platform.python_version(), "pid": os.getpid()}


def serve(descriptor: int, build: Build) -> int:
    """Serves the trainer at the other end of an inherited socket.

    Returns:
      The exit code: 0 once the trainer has closed or left, 1 when the engine failed; the trainer has been told why.
    """
    # Who preempts a job may send SIGTERM to every process; the trainer then ends its step, and needs this one for it. Not SIG_IGN, which
    # programs started from here would inherit.
    signal.signal(signal.SIGTERM, lambda *_: None)
    channel = Channel(socket.socket(fileno=descriptor))
    # A step, or loading a model, may take long; a trainer that is gone must not leave this process behind until then.
    threading.Thread(target=_end_with_trainer, args=(channel,), daemon=True).start()
    try:
        return _serve(channel, build)
    except ChannelClosed:
        return 0


def _serve(channel: Channel, build: Build) -> int:
    channel.send(hello())
    start = channel.receive(None)
    assert start is not None and start["type"] == "start"  # code and protocol are the trainer's own, or it would have left
    try:
        generator = build(start)
        channel.send({"type": "ready", **generator.facts()})
        run(channel, Server(generator, channel.send))
    except ChannelClosed:
        raise
    except Exception as error:
        traceback.print_exc()
        channel.send({"type": "failed", "message": one_line(error)})
        return 1
    return 0


def run(channel: Channel, server: Server) -> None:
    """Takes every message that has arrived, then one step; waits for messages while there is nothing to generate."""
    while not server.closed:
        message = channel.receive(0.0 if server.busy else None)
        if message is not None:
            server.handle(message)
        else:
            server.advance()


def _end_with_trainer(channel: Channel) -> None:
    channel.wait_for_end()
    os._exit(0)
