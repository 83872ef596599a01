"""Handles that end with their `with` block."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T", bound="Closing")


class Closing:
    """What has a `close`."""

    def close(self) -> None:
        """Gives back what it holds; may be called twice."""
        raise NotImplementedError

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
