"""Which sample and position every row of a forward belongs to, and how often that position was computed before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EXTRA = "trace_jax"
"""Key of a request's `SamplingParams.extra_args`: `[sample, attempt]` or `[sample, attempt, audit]`."""


@dataclasses.dataclass(frozen=True)
class SampleKey:
    """The trainer's name of a sequence, and whether it is audited."""

    sample: int
    attempt: int
    audit: bool


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of a forward that belong to samples.

    Args:
      count: rows of the forward, without padding.
      index: int64[n], those of samples, ascending.
      sample, attempt, position, passes: uint64, uint16, uint32, uint16[n]; `passes` counts earlier computations of the position.
      audited: bool[n].
    """

    count: int
    index: np.ndarray
    sample: np.ndarray
    attempt: np.ndarray
    position: np.ndarray
    passes: np.ndarray
    audited: np.ndarray


def sample_key(request_id: str, extra_args: Mapping[str, Any] | None) -> SampleKey | None:
    """The sample of a request; None for a request that is not the trainer's.

    A list of samples names the answers of a request with n > 1, whose children vLLM calls `INDEX_ID`. Ids of 2^63 and above may
    come as decimal strings.

    Raises:
      ValueError: an entry that names no sample.
    """
    entry = (extra_args or {}).get(EXTRA)
    if entry is None:
        return None
    try:
        sample, attempt, *audit = entry
        if isinstance(sample, (list, tuple)):
            sample = sample[int(request_id.partition("_")[0]) if len(sample) > 1 else 0]
        key = SampleKey(int(sample), int(attempt), any(audit))
        if not (0 <= key.sample < 1 << 64 and 0 <= key.attempt < 1 << 16):
            raise ValueError("out of range")
    except (TypeError, ValueError, IndexError) as error:
        wanted = "[sample, attempt] or [sample, attempt, audit]"
        raise ValueError(f"request {request_id}: extra_args[{EXTRA!r}] is {entry!r}; write {wanted}") from error
    return key


class RequestRows:
    """Follows the running requests from forward to forward."""

    def __init__(self) -> None:
        self._keys: dict[str, SampleKey | None] = {}
        self._computed: dict[str, list[tuple[int, int]]] = {}

    def forward(
        self, ids: Sequence[str], starts: np.ndarray, bounds: np.ndarray, extra_args: Mapping[str, Mapping[str, Any] | None]
    ) -> Rows:
        """The rows of the next forward.

        Args:
          ids: the engine's request ids, in the order of the batch.
          starts: position of each request's first row.
          bounds: first row of each request, and the end of the last.
          extra_args: those of all requests that the engine still knows, by request id; what is gone is forgotten.

        Raises:
          ValueError: as `sample_key`.
        """
        for gone in self._keys.keys() - extra_args.keys():
            del self._keys[gone]
            self._computed.pop(gone, None)
        parts = []
        for request, first, begin, end in zip(ids, starts.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            if request not in self._keys:
                self._keys[request] = sample_key(request, extra_args[request])
            key = self._keys[request]
            if key is not None and end > begin:
                parts.append((key, begin, first, self._passes(request, first, first + end - begin)))
        sizes = np.asarray([passes.size for *_, passes in parts], np.int64)
        within = np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)])

        def column(values: list[int], dtype: type) -> np.ndarray:
            return np.repeat(np.asarray(values, dtype), sizes)

        return Rows(
            count=int(bounds[-1]),
            index=column([begin for _, begin, _, _ in parts], np.int64) + within,
            sample=column([key.sample for key, *_ in parts], np.uint64),
            attempt=column([key.attempt for key, *_ in parts], np.uint16),
            position=(column([first for _, _, first, _ in parts], np.int64) + within).astype(np.uint32),
            passes=np.concatenate([np.zeros(0, np.uint16), *(passes for *_, passes in parts)]),
            audited=column([key.audit for key, *_ in parts], np.bool_),
        )

    def _passes(self, request: str, start: int, stop: int) -> np.ndarray:
        """How many of the ranges that were computed before hold each position; the new range is added to them."""
        ranges = self._computed.setdefault(request, [])
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
        passes = np.zeros(stop - start, np.uint16)
        for first, last in ranges[:-1]:
            passes[max(first - start, 0) : max(last - start, 0)] += 1
        return passes
