"""What the server needs from whatever generates: vLLM in a worker, a script in tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Drawn:
    """Tokens that one step drew for one request.

    Args:
      id: the request's number.
      tokens: new token ids.
      logprobs: their log-probabilities under the distribution sampled from, float32 values.
      finish: `stop`, `length`, or another word if the engine gave the request up; None while it goes on.
    """

    id: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None = None


@runtime_checkable
class Generator(Protocol):
    """Draws tokens for many requests, step by step."""

    def add(self, request: Mapping[str, Any]) -> None:
        """Takes a request (the fields of `submit`). Raises ValueError for one that it cannot serve."""
        ...

    def abort(self, ids: Iterable[int]) -> None:
        """Forgets requests that are running."""
        ...

    def step(self) -> list[Drawn]:
        """One step for the requests that fit; called only while there are some."""
        ...

    def update_weights(self, ring: str, version: int) -> dict[str, Any]:
        """Takes in new weights from a ring.

        Returns:
          `count`, `checksum`, `version` of what arrived.

        Raises:
          ValueError: it is not a complete update that fits; the old weights stay.
        """
        ...

    def compensate(self, channels: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """Compensates these channels of the quantized products from now on: site -> the channels of each layer."""
        ...

    def capabilities(self) -> dict[str, Any]:
        """The formats that really execute."""
        ...

    def facts(self) -> dict[str, Any]:
        """What the trainer should know of the model: at least `max_model_len` and `engine`, name and version in words."""
        ...

    def close(self) -> None:
        """Releases everything."""
        ...
