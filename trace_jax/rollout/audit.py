"""Full-code records of a few audited sequences.

An audit captures every layer with all four bits for diagnosis (code agreement, distance). It is many times larger than the
compact record, so it holds rows of the audited sequences only and is never used to train.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import check


@dataclasses.dataclass(frozen=True, eq=False)
class Audit:
    """The audited sequences of a batch and the record of their tokens, one sequence after the other.

    Attributes:
        sequences: indices into the batch that carries the audit, ascending.
        record: record of kind "codes"; its rows are the tokens of those sequences in that order.
    """

    sequences: Int64[np.ndarray, " A"]
    record: GuidanceRecord

    def select(self, chosen: Int64[np.ndarray, " S"], lengths: Int64[np.ndarray, " B"]) -> Audit | None:
        """The audit of a selection.

        Args:
            chosen: batch indices in their new order.
            lengths: tokens of each sequence of the old batch.

        Returns:
            The audit with indices into the selection, None if no audited sequence was chosen.
        """
        ends = np.cumsum(lengths[self.sequences])
        start_of = {int(s): int(end - lengths[s]) for s, end in zip(self.sequences, ends, strict=True)}
        kept = [(new, int(old)) for new, old in enumerate(chosen) if int(old) in start_of]
        if not kept:
            return None
        rows = np.concatenate([np.arange(start_of[old], start_of[old] + lengths[old]) for _, old in kept])
        return Audit(np.asarray([new for new, _ in kept], np.int64), self.record.take(rows))

    @staticmethod
    def concat(parts: Sequence[Audit | None], num_sequences: Sequence[int]) -> Audit | None:
        """The audits of several batches, renumbered for the joined batch; None if there is none."""
        starts = np.cumsum([0, *num_sequences])
        present = [(part, start) for part, start in zip(parts, starts, strict=False) if part is not None]
        record = GuidanceRecord.concat([part.record for part, _ in present], [part.record.num_tokens for part, _ in present])
        if record is None:
            return None
        return Audit(np.concatenate([part.sequences + start for part, start in present]), record)

    def validate(self, lengths: Int64[np.ndarray, " B"]) -> None:
        """Raise ValueError, naming the field, unless the audit fits a batch of these sequence lengths."""
        check("audit.sequences", self.sequences, np.int64, (self.sequences.size,))
        inside = self.sequences.size == 0 or (self.sequences[0] >= 0 and self.sequences[-1] < lengths.size)
        if not inside or np.any(np.diff(self.sequences) <= 0):
            raise ValueError(f"audit.sequences: {self.sequences.tolist()} must be ascending indices of {lengths.size} sequences")
        if self.record.kind != "codes":
            raise ValueError(f"audit.record.kind: {self.record.kind!r}; an audit holds 'codes'")
        self.record.validate(int(lengths[self.sequences].sum()))
