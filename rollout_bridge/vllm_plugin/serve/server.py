"""Which requests run, which wait, and which weights drew each token: everything between the messages and the generator."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_bridge.vllm_plugin.serve.channel import Message
from rollout_bridge.vllm_plugin.serve.generator import Drawn, Generator

ALIVE_S = 1.0
"""A generating server is silent for no longer than this and one step."""


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    """Runs of [version, number of tokens]."""


class Server:
    """Answers messages and generates; does not know how messages travel.

    Args:
      generator: draws the tokens.
      emit: takes what is to be sent.
    """

    def __init__(self, generator: Generator, emit: Callable[[Message], None]):
        self._generator = generator
        self._emit = emit
        self._running: dict[int, _Answer] = {}
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._paused: str | None = "keep"
        self._draining: int | None = None
        self._version = -1
        self._steps = 0
        self._spoke = time.monotonic()
        self.closed = False

    @property
    def busy(self) -> bool:
        """Whether `advance` would do something."""
        return bool(self._running) and self._paused in (None, "wait")

    def handle(self, message: Message) -> None:
        """Does what a message asks.

        A ValueError becomes the reply of a call: nothing has changed. Any other error leaves an engine in doubt and is raised.
        """
        kind, call = message["type"], message.get("call")
        if kind == "submit":
            for request in message["requests"]:
                self._submit(request)
        elif kind == "close":
            self.closed = True
            self._generator.close()
        elif kind == "pause":
            self._pause(message["mode"], call)
        else:
            calls = {
                "abort": lambda asked: self._abort(asked["ids"]),
                "resume": self._resume,
                "update_weights": self._update_weights,
                "compensate": self._compensate,
                "capabilities": lambda _: {"capabilities": self._generator.capabilities()},
                "health": lambda _: self._health(),
            }
            try:
                reply = calls[kind](message)
            except ValueError as error:
                traceback.print_exc()
                reply = {"error": one_line(error)}
            self._say({"type": "reply", "call": call, **reply})

    def advance(self) -> None:
        """One step of the generator, and what came of it."""
        for drawn in self._generator.step():
            self._take(drawn)
        self._steps += 1
        if not self._running and self._draining is not None:
            self._say({"type": "reply", "call": self._draining})
            self._draining = None
        if time.monotonic() - self._spoke >= ALIVE_S:
            self._say({"type": "alive", **self._health()})

    def _submit(self, request: Mapping[str, Any]) -> None:
        if self._paused is not None:
            self._waiting[request["id"]] = request
            return
        try:
            self._generator.add(request)
        except ValueError as error:
            self._say({"type": "refused", "id": request["id"], "message": one_line(error)})
        else:
            self._running[request["id"]] = _Answer()

    def _abort(self, ids: Sequence[int]) -> Message:
        self._generator.abort([number for number in ids if number in self._running])
        for number in ids:
            self._running.pop(number, None)
            self._waiting.pop(number, None)
        return {}

    def _pause(self, mode: str, call: int | None) -> None:
        self._paused = mode
        if mode == "abort":
            self._abort([*self._running, *self._waiting])
        if mode == "wait" and self._running:
            self._draining = call
        else:
            self._say({"type": "reply", "call": call})

    def _resume(self, _: Message) -> Message:
        self._paused = None
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._submit(request)
        return {}

    def _update_weights(self, message: Message) -> Message:
        acknowledged = self._generator.update_weights(message["ring"], message["version"])
        self._version = acknowledged["version"]
        return acknowledged

    def _compensate(self, message: Message) -> Message:
        self._generator.compensate(message["channels"])
        return {}

    def _health(self) -> Message:
        waiting = len(self._waiting)
        return {"running": len(self._running), "waiting": waiting, "paused": self._paused, "version": self._version, "steps": self._steps}

    def _take(self, drawn: Drawn) -> None:
        answer = self._running.get(drawn.id)
        if answer is None:
            return
        answer.tokens += drawn.tokens
        answer.logprobs += drawn.logprobs
        if drawn.tokens:
            if not answer.versions or answer.versions[-1][0] != self._version:
                answer.versions.append([self._version, 0])
            answer.versions[-1][1] += len(drawn.tokens)
        if drawn.finish is None:
            return
        del self._running[drawn.id]
        if drawn.finish not in ("stop", "length"):
            self._say({"type": "aborted", "ids": [drawn.id], "version": self._version})
            return
        self._say(
            {
                "type": "finished",
                "id": drawn.id,
                "tokens": answer.tokens,
                "logprobs": answer.logprobs,
                "versions": answer.versions,
                "reason": drawn.finish,
            }
        )

    def _say(self, message: Message) -> None:
        self._spoke = time.monotonic()
        self._emit(message)


def one_line(error: BaseException, longest: int = 400) -> str:
    """The message of an error, or its name if it has none, on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
