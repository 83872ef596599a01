"""Trajectories: generated sequences as ragged columns.

B sequences hold N tokens in all; sequence b owns rows `offsets[b]:offsets[b + 1]` of every per-token column. Columns are
plain NumPy arrays, possibly read-only views of a shared or mapped buffer. Padding and packing are made from them by
`trace_jax.rollout.padding`; files and JSON rows by `trace_jax.rollout.storage`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Int64, UInt8, UInt16, UInt64

from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import Rows, check
from trace_jax.rollout.audit import Audit
from trace_jax.rollout.routes import Routes


class FinishReason(IntEnum):
    """Why a sequence ended; stored as uint8."""

    STOP = 0
    """A stop token was drawn."""
    LENGTH = 1
    """`max_new_tokens` or the model's context was reached: the answer is truncated."""
    ABORTED = 2
    """The caller or an engine failure ended it."""


TOKEN_COLUMNS = {"tokens": np.int32, "sampled": np.bool_, "logprobs": np.float32, "weight_version": np.int32}
SEQUENCE_COLUMNS = {
    "sample_id": np.uint64,
    "prompt_id": np.uint64,
    "group": np.int64,
    "attempt": np.uint16,
    "temperature": np.float32,
    "finish_reason": np.uint8,
    "reward": np.float32,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectories:
    """A batch of generated sequences.

    Attributes:
        offsets: row range of each sequence, B + 1 bounds.
        tokens: token ids, prompt and answer (and, with several turns, the environment's tokens).
        sampled: true where the policy drew the token; only these enter the loss.
        logprobs: log p of tokens[i] given what precedes it, under the distribution sampled from; 0 where not sampled.
        weight_version: optimizer updates behind the weights that processed the token.
        sample_id: unique id of the sequence, the key of the guidance cache.
        prompt_id: id of the prompt.
        group: sequences whose rewards are compared.
        attempt: 0, or how often the sample was generated before.
        temperature: sampling temperature.
        finish_reason: a `FinishReason`.
        reward: NaN until scored.
        top_ids: optional ids of the most probable tokens at each row.
        top_logprobs: their log-probs.
        routes: optional expert routes, aligned to tokens.
        guidance: optional guidance record, aligned to tokens.
        audit: optional full-code record of some of the sequences, for diagnosis only.
    """

    offsets: Int64[np.ndarray, " bounds"]
    tokens: Int32[np.ndarray, " N"]
    sampled: Bool[np.ndarray, " N"]
    logprobs: Float32[np.ndarray, " N"]
    weight_version: Int32[np.ndarray, " N"]
    sample_id: UInt64[np.ndarray, " B"]
    prompt_id: UInt64[np.ndarray, " B"]
    group: Int64[np.ndarray, " B"]
    attempt: UInt16[np.ndarray, " B"]
    temperature: Float32[np.ndarray, " B"]
    finish_reason: UInt8[np.ndarray, " B"]
    reward: Float32[np.ndarray, " B"]
    top_ids: Int32[np.ndarray, "N k"] | None = None
    top_logprobs: Float32[np.ndarray, "N k"] | None = None
    routes: Routes | None = None
    guidance: GuidanceRecord | None = None
    audit: Audit | None = None

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.offsets.size - 1

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.tokens.shape[0]

    def lengths(self) -> Int64[np.ndarray, " B"]:
        """Tokens of each sequence."""
        return np.diff(self.offsets)

    def sampled_lengths(self) -> Int64[np.ndarray, " B"]:
        """Tokens the policy drew in each sequence."""
        running = np.concatenate([[0], np.cumsum(self.sampled, dtype=np.int64)])
        return np.diff(running[self.offsets])

    @staticmethod
    def empty() -> Trajectories:
        """No sequences: what an engine's `poll` returns when nothing has finished."""
        columns: dict[str, Any] = {name: np.zeros(0, dtype) for name, dtype in (TOKEN_COLUMNS | SEQUENCE_COLUMNS).items()}
        return Trajectories(offsets=np.zeros(1, np.int64), **columns)

    def replace(self, **columns: Any) -> Trajectories:
        """A copy with some columns exchanged, for instance `reward` after verification."""
        return dataclasses.replace(self, **columns)

    def sequence(self, index: int) -> Trajectories:
        """One sequence as a batch of one; its columns are views."""
        if not 0 <= index < self.num_sequences:
            raise IndexError(f"sequence {index} of {self.num_sequences}")
        return self._take(slice(index, index + 1), slice(int(self.offsets[index]), int(self.offsets[index + 1])))

    def select(self, indices: Sequence[int] | Int[np.ndarray, " S"]) -> Trajectories:
        """Some sequences in the given order; views if they are adjacent and in order, copies otherwise."""
        chosen = np.asarray(indices, np.int64)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= self.num_sequences):
            raise IndexError(f"sequence indices {chosen.min()}..{chosen.max()} of {self.num_sequences} sequences")
        if chosen.size and np.all(np.diff(chosen) == 1):
            first, last = int(chosen[0]), int(chosen[-1]) + 1
            return self._take(slice(first, last), slice(int(self.offsets[first]), int(self.offsets[last])))
        return self._take(chosen, token_rows(self.offsets[:-1][chosen], self.lengths()[chosen]))

    def _take(self, sequences: Rows, rows: Rows) -> Trajectories:
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in TOKEN_COLUMNS}
        columns |= {name: getattr(self, name)[sequences] for name in SEQUENCE_COLUMNS}
        lengths = self.lengths()[sequences]
        return Trajectories(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]),
            **columns,
            top_ids=None if self.top_ids is None else self.top_ids[rows],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[rows],
            routes=None if self.routes is None else self.routes.take(rows),
            guidance=None if self.guidance is None else self.guidance.take(rows),
            audit=None if self.audit is None else self.audit.select(np.arange(self.num_sequences)[sequences], self.lengths()),
        )

    @staticmethod
    def concat(parts: Sequence[Trajectories]) -> Trajectories:
        """All sequences of several batches in order.

        A batch without routes or guidance gets missing rows. Its `top_ids` must agree: all batches or none.

        Raises:
            ValueError: records or routes of different layout, or `top_ids` of different width.
        """
        parts = [part for part in parts if part.num_sequences]
        if len(parts) < 2:
            return parts[0] if parts else Trajectories.empty()
        counts = [part.num_tokens for part in parts]
        shifted = [part.offsets[1:] + start for part, start in zip(parts, np.cumsum([0, *counts[:-1]]), strict=True)]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in (TOKEN_COLUMNS | SEQUENCE_COLUMNS)
        }
        return Trajectories(
            offsets=np.concatenate([np.zeros(1, np.int64), *shifted]),
            **columns,
            top_ids=_concat_optional([part.top_ids for part in parts], "top_ids"),
            top_logprobs=_concat_optional([part.top_logprobs for part in parts], "top_logprobs"),
            routes=Routes.concat([part.routes for part in parts], counts),
            guidance=GuidanceRecord.concat([part.guidance for part in parts], counts),
            audit=Audit.concat([part.audit for part in parts], [part.num_sequences for part in parts]),
        )

    def validate(self) -> None:
        """Check the whole batch against the data contract.

        Raises:
            ValueError: the message starts with the name of the field.
        """
        if not isinstance(self.offsets, np.ndarray) or self.offsets.ndim != 1 or self.offsets.size == 0:
            raise ValueError("offsets: expected an int64 array of B + 1 entries")
        check("offsets", self.offsets, np.int64, self.offsets.shape)
        num_tokens = self.num_tokens
        if self.offsets[0] != 0 or self.offsets[-1] != num_tokens or np.any(np.diff(self.offsets) < 0):
            raise ValueError(f"offsets: must rise from 0 to the {num_tokens} tokens of the batch")
        for name, dtype in TOKEN_COLUMNS.items():
            check(name, getattr(self, name), dtype, (num_tokens,))
        for name, dtype in SEQUENCE_COLUMNS.items():
            check(name, getattr(self, name), dtype, (self.num_sequences,))
        if np.any(self.tokens < 0):
            raise ValueError("tokens: negative token id")
        if not np.all(np.isfinite(self.logprobs)):
            raise ValueError("logprobs: not finite")
        if np.any(self.logprobs[~self.sampled] != 0):
            raise ValueError("logprobs: must be 0 where `sampled` is false")
        if not np.all(np.isfinite(self.temperature) & (self.temperature >= 0)):
            raise ValueError("temperature: must be finite and not negative")
        if np.any(self.finish_reason > max(FinishReason)):
            raise ValueError(f"finish_reason: expected {[int(reason) for reason in FinishReason]}")
        self._validate_attachments()

    def _validate_attachments(self) -> None:
        num_tokens = self.num_tokens
        if (self.top_ids is None) != (self.top_logprobs is None):
            raise ValueError("top_ids: `top_ids` and `top_logprobs` come together")
        if self.top_ids is not None:
            check("top_ids", self.top_ids, np.int32, (num_tokens, self.top_ids.shape[-1]))
            check("top_logprobs", self.top_logprobs, np.float32, self.top_ids.shape)
        if self.routes is not None:
            self.routes.validate(num_tokens)
            last = self.offsets[1:][self.lengths() > 0] - 1
            if np.any(self.routes.routes_valid[last]):
                raise ValueError("routes_valid: the last token of a sequence is never an input and has no route")
        if self.guidance is not None:
            self.guidance.validate(num_tokens)
        if self.audit is not None:
            self.audit.validate(self.lengths())


def token_rows(starts: Int64[np.ndarray, " S"], lengths: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " N"]:
    """Row numbers of the ranges `starts[i] : starts[i] + lengths[i]`, one after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    # Each range is an arange shifted by the difference between its start and its place in the result.
    return np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)


def _concat_optional(parts: list[np.ndarray | None], name: str) -> np.ndarray | None:
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) != len(parts) or len({part.shape[-1] for part in present}) > 1:
        raise ValueError(f"{name}: batches with and without it, or of different width, cannot be joined")
    return np.concatenate(present)
