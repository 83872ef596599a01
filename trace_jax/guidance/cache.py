"""GuidanceCache: the rollout's record, kept until the trainer needs it, keyed by sample.

1. `put` takes finished trajectories and stores each batch with its record: in memory, or as a mapped file in a folder.
2. `slices` gives the trainer the rows of a micro-batch, for some layers; `get` gives whole trajectories, so that an engine
   can score them again under the recorded codes.
3. The bytes stay within a budget: the batch used longest ago is dropped as a whole.
4. A sample that was dropped, or whose file is damaged, counts as missing: the caller generates it again or trains its
   tokens unguided.
5. `open` continues after a restart with what is on disk. Only `put` and `convert` change the folder.

One process writes. Not thread-safe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt64

from trace_jax.guidance.batch_store import BatchStore
from trace_jax.guidance.cache_index import layout_hash
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import RecordKind
from trace_jax.rollout.trajectories import Trajectories


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Size and counters of a cache; the counters are samples and start at 0 when it is opened.

    Attributes:
        samples: stored.
        batches: stored.
        bytes: of all batches, headers included.
        budget_bytes: most bytes.
        hits: asked for and there.
        missing: asked for and not there, for whatever reason.
        evicted: dropped for the budget.
        damaged: dropped because the file was not what had been stored.
    """

    samples: int
    batches: int
    bytes: int
    budget_bytes: int
    hits: int
    missing: int
    evicted: int
    damaged: int


class GuidanceCache:
    """See the module docstring. The constructor makes an empty cache in memory, `open` one with a folder."""

    def __init__(self, budget_bytes: int) -> None:
        """An empty cache in memory.

        Args:
            budget_bytes: most bytes to hold.

        Raises:
            UserError: the budget is not positive.
        """
        self._store = BatchStore(budget_bytes)
        self._hits = 0
        self._missing = 0

    @classmethod
    def open(cls, directory: Path, budget_bytes: int | None = None) -> GuidanceCache:
        """The cache in a folder, with everything of it that survived.

        Args:
            directory: cache folder; made if it does not exist and a budget is given.
            budget_bytes: most bytes to hold on disk, between writes; None keeps the budget it was made with.

        Raises:
            UserError: there is no cache and no budget to make one, it was written by another version, or the folder
                cannot be made or read.
        """
        store = BatchStore.open_folder(Path(directory), budget_bytes)
        cache = cls(store.budget_bytes)
        cache._store = store
        return cache

    def put(self, trajectories: Trajectories) -> None:
        """Store a batch; a sample that is already stored is replaced.

        Raises:
            ValueError: no guidance, two sequences with one sample id, or another record form than the cache holds.
            UserError: the batch alone is larger than the budget, or the disk is full.
        """
        if trajectories.guidance is None:
            raise ValueError("guidance: the trajectories carry no record to store")
        if not self._store.accepts(layout_hash(trajectories.guidance)):
            raise ValueError("guidance: the record's form differs from the cache's (kind, layers, sites or format); convert one of them")
        samples = {int(sample): place for place, sample in enumerate(trajectories.sample_id)}
        if len(samples) != trajectories.num_sequences:
            raise ValueError("sample_id: two sequences share one id")
        if samples:
            self._store.add(trajectories, samples)

    def get(self, sample_ids: Iterable[int | np.integer]) -> Trajectories:
        """Stored trajectories with their record, in the order asked for.

        Samples that are not there are left out and counted; compare `sample_id` of the result.

        Raises:
            UserError: a file cannot be read now (permissions, too many open files), or was written by another version.
        """
        wanted = list(dict.fromkeys(int(sample) for sample in sample_ids))
        entry_of = {sample: entry for sample in wanted if (entry := self._store.find(sample)) is not None}
        self._count(len(entry_of), len(wanted) - len(entry_of))
        parts = []
        for entry in dict.fromkeys(entry_of.values()):
            chosen = [entry.samples[sample] for sample, holder in entry_of.items() if holder is entry]
            parts.append(self._store.batch(entry).select(chosen))
        joined = Trajectories.concat(parts)
        place = {int(sample): index for index, sample in enumerate(joined.sample_id)}
        return joined.select([place[sample] for sample in entry_of])

    def slices(
        self, sample_ids: Iterable[int | np.integer], lengths: Sequence[int] | Int[np.ndarray, " S"], layers: Sequence[int] | None = None
    ) -> GuidanceRecord | None:
        """The record of a micro-batch, aligned to the tokens of its sequences one after the other.

        Args:
            sample_ids: sequences.
            lengths: tokens of each.
            layers: global layer ids to serve; None serves all that are stored.

        Returns:
            The record; rows of missing samples are invalid and counted. None if the form is unknown because no stored
            batch was ever seen.

        Raises:
            ValueError: a stored sample has another length: the record belongs to other tokens.
        """
        parts: list[GuidanceRecord | None] = []
        counts = [int(length) for length in lengths]
        for sample, length in zip(sample_ids, counts, strict=True):
            entry = self._store.find(int(sample))
            record = None
            if entry is not None:
                record = self._store.batch(entry).sequence(entry.samples[int(sample)]).guidance
            if record is not None and record.num_tokens != length:
                raise ValueError(f"lengths: sample {sample} has {record.num_tokens} stored tokens, {length} were asked for")
            self._count(int(record is not None), int(record is None))
            parts.append(record if record is None or layers is None else record.take_layers(layers))
        form = self._store.form
        if form is None:
            return None
        # The part without rows gives the form even if every sample is missing.
        return GuidanceRecord.concat([form if layers is None else form.take_layers(layers), *parts], [0, *counts])

    def convert(self, kind: RecordKind, layers: Sequence[int] | None = None) -> None:
        """Replace every record by a smaller one, for instance full codes by the mantissa bits of the deeper layers.

        A folder needs room for both forms until the end; an interruption leaves the old one. Audits are dropped.

        Raises:
            ValueError: the stored kind does not hold what `kind` needs.
        """

        def smaller() -> Iterator[tuple[Trajectories, dict[int, int]]]:
            for entry in list(self._store.entries.values()):
                if self._store.readable(entry):
                    batch = self._store.batch(entry).select(list(entry.samples.values()))
                    record = None if batch.guidance is None else batch.guidance.to_compact(kind, layers)
                    yield batch.replace(guidance=record, audit=None), {sample: place for place, sample in enumerate(entry.samples)}

        self._store.replace_all(smaller())

    def keys(self) -> UInt64[np.ndarray, " S"]:
        """Stored sample ids, those of the batch used longest ago first."""
        return np.asarray([sample for entry in self._store.entries.values() for sample in entry.samples], np.uint64)

    def stats(self) -> CacheStats:
        """Size and counters."""
        store = self._store
        return CacheStats(
            samples=store.num_samples,
            batches=len(store.entries),
            bytes=store.nbytes,
            budget_bytes=store.budget_bytes,
            hits=self._hits,
            missing=self._missing,
            evicted=store.evicted,
            damaged=store.damaged,
        )

    def _count(self, hits: int, missing: int) -> None:
        self._hits += hits
        self._missing += missing
