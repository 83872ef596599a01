"""Rows from a reasoning-gym data set: generated questions with their own scorer."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from trace_jax.errors import UserError
from trace_jax.tasks.importing import nearest
from trace_jax.tasks.source import RawRow

PREFIX = "reasoning_gym:"
DEFAULT_SIZE = 2000


def reasoning_gym_data(name: str, params: Mapping[str, Any], seed: int) -> Any:
    """The data set object.

    Args:
      name: data set name, such as "chain_sum".
      params: fields of the data set's config; `size` (entries to generate, default 2000) and `seed` among them.
      seed: used unless `params` has its own.

    Raises:
      UserError: package missing, unknown data set or parameter (a near name is given where there is one), refused value.
    """
    try:
        with warnings.catch_warnings():
            # A dependency (cellpylib 2.4.0) compares with `is`; Python says so when it compiles the file for the first time.
            warnings.simplefilter("ignore", SyntaxWarning)
            from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise UserError(f"task {PREFIX}{name} needs the package reasoning-gym; install it with pip install reasoning-gym") from error
    if name not in DATASETS:
        raise UserError(f"reasoning_gym has no data set {name!r}{nearest(name, DATASETS)}; take one of reasoning_gym.factory.DATASETS")
    fields = {entry.name for entry in dataclasses.fields(DATASETS[name][1])}
    for key in params:
        if key not in fields:
            known = ", ".join(sorted(fields))
            raise UserError(f"task.params.{key}: {PREFIX}{name} has no such parameter{nearest(key, fields)}; it takes {known}")
    settings = {"size": DEFAULT_SIZE, "seed": seed, **params}
    if not isinstance(settings["size"], int) or settings["size"] < 1:
        raise UserError(f"task.params.size is {settings['size']!r}; write a whole number of entries, 1 or more")
    try:
        with warnings.catch_warnings():
            # The ARC data sets leave their data file to the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            return create_dataset(name, **settings)
    except Exception as error:
        # The configs check themselves with assert, and wrong types surface as whatever they break.
        raise UserError(f"task.params of {PREFIX}{name} are refused ({error or type(error).__name__}); change them") from error


def reasoning_gym_rows(name: str, params: Mapping[str, Any], seed: int) -> Iterator[RawRow]:
    """Generated rows; `meta` keeps the whole entry for its scorer under "entry"."""
    data = reasoning_gym_data(name, params, seed)
    for index in range(len(data)):
        where = f"{PREFIX}{name} entry {index}"
        try:
            entry = data[index]
        except Exception as error:
            raise UserError(f"{where} could not be generated ({type(error).__name__}: {error}); change task.params") from error
        answer = entry["answer"]
        yield RawRow(where, entry["question"], "" if answer is None else str(answer), meta={"data_source": PREFIX + name, "entry": entry})
