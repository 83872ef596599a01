"""Batches of trajectories under a byte budget: in memory, or one mapped file each in a folder.

1. `add` writes a batch whole or not at all, after dropping the batches used longest ago until it fits.
2. `find` checks a file the first time it is used. The samples of a file that is damaged, gone or of another form are
   missing: counted, never returned. A file that cannot be read now, or by this version, ends the call.
3. `open_folder` continues after a restart: index first, then data files newer than the index (a crash fell between the
   two writes), or all data files if the index is lost.
4. Only a write (`add`, `replace_all`) changes the folder. It ends with the new index, and after that removes the files
   that the index no longer lists; reading leaves everything as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.guidance.cache_index import Entry, Index, data_files, layout_hash, read_index, serial_of, write_index
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.rollout.array_file import LostContent
from trace_jax.rollout.storage import encode_trajectories, load_trajectories
from trace_jax.rollout.trajectories import Trajectories


class BatchStore:
    """The storage behind `GuidanceCache`.

    Attributes:
        budget_bytes: most bytes of all batches together.
        entries: batches by name, least recently used first.
        form: zero rows of the stored record form; None until a batch was added or read.
        evicted: samples dropped for the budget.
        damaged: samples dropped because their file was not what had been stored.
    """

    def __init__(self, budget_bytes: int, directory: Path | None = None) -> None:
        """An empty store; `directory` must exist and hold no batches."""
        if budget_bytes < 1:
            raise UserError(f"cache budget_bytes is {budget_bytes}; write a positive number of bytes")
        self.budget_bytes = budget_bytes
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.form: GuidanceRecord | None = None
        self.evicted = 0
        self.damaged = 0
        self._directory = directory
        self._entry_of: dict[int, Entry] = {}
        self._layout: str | None = None
        self._next_serial = 0
        self._unlisted: set[str] = set()

    @classmethod
    def open_folder(cls, directory: Path, budget_bytes: int | None) -> BatchStore:
        """The store of a folder with everything that survived; see `GuidanceCache.open`."""
        try:
            if budget_bytes is not None:
                directory.mkdir(parents=True, exist_ok=True)
            index, files = read_index(directory), data_files(directory)
        except OSError as error:
            raise UserError(f"cannot open the cache folder {directory}: {error.strerror}; give a folder that you may use") from error
        if budget_bytes is None:
            if index is None and not files:
                raise UserError(f"no guidance cache in {directory}; give the folder that `--save-cache` wrote")
            budget_bytes = index.budget_bytes if index else max(1, sum(files.values()))
        store = cls(budget_bytes, directory)
        store._recover(index or Index(None, -1, 0, ()), files)
        return store

    def _recover(self, index: Index, files: dict[str, int]) -> None:
        self._layout = index.layout
        self._next_serial = max([index.next_serial, *(serial_of(name) + 1 for name in files)])
        sizes = dict(files)
        for entry in index.entries:
            if sizes.pop(entry.name, None) == entry.nbytes:
                self._admit(entry)
            else:
                self.damaged += len(entry.samples)
                self._unlisted.add(entry.name)
        for name in sorted(sizes, key=serial_of):
            # An unlisted file from before the index was written is a leftover; a newer one replaces what it repeats.
            entry = Entry(name, sizes[name], {})
            if serial_of(name) < index.next_serial or not self._read(entry):
                self._unlisted.add(name)
                continue
            samples = {int(sample): place for place, sample in enumerate(self.batch(entry).sample_id)}
            self._forget(samples)
            entry.samples = samples
            self._admit(entry)
        self._make_room(0)

    def __contains__(self, sample: int) -> bool:
        """Whether a sample is listed; its file may still turn out to be damaged."""
        return sample in self._entry_of

    @property
    def num_samples(self) -> int:
        """Live samples."""
        return len(self._entry_of)

    @property
    def nbytes(self) -> int:
        """Bytes of all batches."""
        return sum(entry.nbytes for entry in self.entries.values())

    def accepts(self, layout: str) -> bool:
        """Whether records of this form can stand beside the stored ones."""
        return self._layout in (None, layout)

    def add(self, trajectories: Trajectories, samples: dict[int, int]) -> None:
        """Store a batch as the most recently used one; its samples replace older ones of the same id.

        Raises:
            UserError: the batch alone is larger than the budget, or the disk is full.
        """
        chunks = encode_trajectories(trajectories)
        nbytes = sum(len(chunk) for chunk in chunks)
        if nbytes > self.budget_bytes:
            raise UserError(
                f"one batch of {len(samples)} samples takes {nbytes} bytes, more than the cache's budget of {self.budget_bytes}; "
                "raise guidance.cache_budget_mb or record fewer layers"
            )
        self._forget(samples)
        self._make_room(nbytes)
        entry = self._write(trajectories, samples, chunks)
        self._set_form(trajectories.guidance)
        self._admit(entry)
        self._save_index()

    def replace_all(self, batches: Iterable[tuple[Trajectories, dict[int, int]]]) -> None:
        """Exchange all batches for others, possibly of another form.

        Both exist until the last one is written; then the index switches and the old ones go. An interruption leaves the
        old ones.

        Raises:
            UserError: the disk is full.
        """
        written: list[tuple[Entry, GuidanceRecord | None]] = []
        try:
            for batch, samples in batches:
                written.append((self._write(batch, samples, encode_trajectories(batch)), batch.guidance))
        except BaseException:
            self._unlink(entry.name for entry, _ in written)
            raise
        for entry in list(self.entries.values()):
            self._remove(entry)
        for entry, record in written:
            self._set_form(record)
            self._admit(entry)
        self._save_index()

    def find(self, sample: int) -> Entry | None:
        """The readable entry of a sample, marked as just used; None if there is none."""
        entry = self._entry_of.get(sample)
        if entry is None or not self.readable(entry):
            return None
        self.entries.move_to_end(entry.name)
        return entry

    def readable(self, entry: Entry) -> bool:
        """Read and check an entry; one that is damaged is dropped and counted."""
        if self._read(entry):
            return True
        self.damaged += len(entry.samples)
        self._remove(entry)
        return False

    def batch(self, entry: Entry) -> Trajectories:
        """The trajectories of an entry that `find` or `readable` has checked."""
        if entry.trajectories is None:
            raise RuntimeError(f"cache entry {entry.name} was not read before use")
        return entry.trajectories

    def _forget(self, samples: Iterable[int]) -> None:
        """Take samples out, and a batch with its last sample."""
        for sample in samples:
            entry = self._entry_of.pop(sample, None)
            if entry is not None:
                del entry.samples[sample]
                if not entry.samples:
                    self._remove(entry)

    def _write(self, trajectories: Trajectories, samples: dict[int, int], chunks: Sequence[bytes | memoryview]) -> Entry:
        entry = Entry(f"batch-{self._next_serial:08d}.safetensors", sum(len(chunk) for chunk in chunks), samples)
        self._next_serial += 1
        if self._directory is None:
            entry.trajectories = trajectories
        else:
            write_atomic(self._directory / entry.name, chunks)
        return entry

    def _save_index(self) -> None:
        """End a write: the index of a store with a folder, then the files that are not in it go."""
        if self._directory is not None:
            write_index(self._directory, Index(self._layout, self.budget_bytes, self._next_serial, list(self.entries.values())))
        self._unlink(self._unlisted)
        self._unlisted.clear()

    def _read(self, entry: Entry) -> bool:
        """Whether an entry holds its samples in the form of the store.

        Raises:
            UserError: its file cannot be read now, or by this version, which says nothing about its content.
        """
        if entry.trajectories is not None:
            return True
        if self._directory is None:
            return False
        try:
            batch = load_trajectories(self._directory / entry.name)
        except LostContent:
            return False
        if batch.guidance is None or not self.accepts(layout_hash(batch.guidance)):
            return False
        if any(place >= batch.num_sequences or int(batch.sample_id[place]) != sample for sample, place in entry.samples.items()):
            return False
        entry.trajectories = batch
        self._set_form(batch.guidance)
        return True

    def _set_form(self, record: GuidanceRecord | None) -> None:
        if record is not None:
            self._layout, self.form = layout_hash(record), record.blank(0)

    def _admit(self, entry: Entry) -> None:
        self.entries[entry.name] = entry
        self._entry_of.update(dict.fromkeys(entry.samples, entry))

    def _make_room(self, nbytes: int) -> None:
        while self.entries and self.nbytes + nbytes > self.budget_bytes:
            oldest = next(iter(self.entries.values()))
            self.evicted += len(oldest.samples)
            self._remove(oldest)

    def _remove(self, entry: Entry) -> None:
        for sample in entry.samples:
            self._entry_of.pop(sample, None)
        self.entries.pop(entry.name, None)
        self._unlisted.add(entry.name)

    def _unlink(self, names: Iterable[str]) -> None:
        if self._directory is not None:
            for name in names:
                (self._directory / name).unlink(missing_ok=True)
