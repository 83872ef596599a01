"""A task: rows in three splits, an endless prompt stream over each, and a reward."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import cast

from trace_jax.errors import UserError
from trace_jax.tasks.answers import looks_like_math
from trace_jax.tasks.health import RewardHealth
from trace_jax.tasks.pool import VerifierPool
from trace_jax.tasks.rewards import INLINE, text_answer
from trace_jax.tasks.row import SPLITS, Row, Split, Verdict
from trace_jax.tasks.stream import stream_indices
from trace_jax.tasks.verifiers import VerifierSpec


class Task:
    """Questions, their order, and what an answer earns; `health` watches the reward at work. Made by `load_task`.

    Args:
      name: as in the config.
      splits: rows of each split; no question stands in two.
      reward: name of the reward, or an import path.
      verifier: what the worker runs, None if the reward never needs it.
      seed: orders the prompt stream.
      enlarge: how to get more rows, for the message about an empty split.
      verifier_timeout_s: seconds per completion.
      workers: verifier processes at most; None takes one per CPU, at most 8.
      duplicates: how many repeated questions the source had; they were dropped.
    """

    def __init__(
        self,
        name: str,
        splits: Mapping[Split, Sequence[Row]],
        *,
        reward: str,
        verifier: VerifierSpec | None,
        seed: int = 0,
        enlarge: str = "add rows",
        verifier_timeout_s: float = 5.0,
        workers: int | None = None,
        duplicates: int = 0,
    ):
        self.name, self.reward, self.seed, self.duplicates = name, reward, seed, duplicates
        self._rows: dict[Split, tuple[Row, ...]] = {split: tuple(splits.get(split, ())) for split in SPLITS}
        self._ids = {split: tuple(row.prompt_id for row in rows) for split, rows in self._rows.items()}
        self._enlarge = enlarge
        workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.health = RewardHealth(reward, verifier_timeout_s)
        self._pool = None if verifier is None else VerifierPool(verifier, verifier_timeout_s, workers)

    @property
    def sizes(self) -> dict[Split, int]:
        """Rows per split."""
        return {split: len(rows) for split, rows in self._rows.items()}

    def rows(self, split: str) -> list[Row]:
        """All rows of a split, in source order.

        Raises:
          UserError: unknown or empty split.
        """
        return list(self._rows[self._checked(split)])

    def prompts(self, split: str, start: int, count: int) -> list[Row]:
        """Rows at positions start .. start + count - 1 of the split's endless stream, a pure function of (seed, position).

        Raises:
          UserError: unknown or empty split.
          ValueError: negative position.
        """
        key = self._checked(split)
        return [self._rows[key][index] for index in stream_indices(self._ids[key], self.seed, start, count)]

    def score(self, row: Row, completion: str) -> Verdict:
        """The verdict on one completion."""
        return self.score_batch([row], [completion])[0]

    def score_batch(self, rows: Sequence[Row], completions: Sequence[str]) -> list[Verdict]:
        """Verdicts on completions, each with its row; may be called from any thread.

        A verdict with `error` set is not a wrong answer: the verifier failed or was cut off.

        Raises:
          ValueError: unequal lengths.
          UserError: the verifier cannot be made (missing package or function).
        """
        if len(rows) != len(completions):
            raise ValueError(f"{len(rows)} rows and {len(completions)} completions; give one row per completion")
        verdicts: list[Verdict | None] = [self._inline(row, text) for row, text in zip(rows, completions, strict=True)]
        remote = [index for index, verdict in enumerate(verdicts) if verdict is None]
        if remote and self._pool is not None:
            found = self._pool.verify([(completions[index], rows[index]) for index in remote])
            for index, verdict in zip(remote, found, strict=True):
                verdicts[index] = verdict
        return [verdict for verdict in verdicts if verdict is not None]

    def start(self) -> None:
        """Starts the verifier, if the reward needs one, so that its errors show early and the first batch does not wait."""
        if self._pool is not None:
            self._pool.start()

    def close(self) -> None:
        """Ends the verifier's processes; they also end with this object and with the program."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Task:
        """The task itself; leaving the block closes it."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Closes the task."""
        self.close()

    def _inline(self, row: Row, completion: str) -> Verdict | None:
        """The verdict, if it needs no worker."""
        if self.reward in INLINE:
            return INLINE[self.reward](completion, row)
        if self.reward == "auto" and not looks_like_math(row.answer):
            return text_answer(completion, row)
        if self.reward in ("auto", "math"):
            by_text = text_answer(completion, row)
            return by_text if by_text.correct or not completion.strip() else None
        return None

    def _checked(self, split: str) -> Split:
        if split not in SPLITS:
            raise UserError(f"task {self.name} has no split {split!r}; write {', '.join(SPLITS)}")
        key = cast(Split, split)
        if not self._rows[key]:
            sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
            raise UserError(f"split {split!r} of task {self.name} is empty (rows: {sizes}); {self._enlarge}")
        return key
