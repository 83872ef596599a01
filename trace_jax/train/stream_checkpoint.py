"""A checkpoint of parameters that never are in memory together: they are written piece by piece as they are read.

Orbax saves a tree that has all names and no sizes; then each of its arrays is made anew with its true shape, and filled. The result is what
Orbax restores, with one chunk for each piece of the source.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jaxtyping import Float

from trace_jax.models.registry import Params
from trace_jax.train.manifest import MANIFEST, write_manifest

Piece = tuple[tuple[str | int, ...], tuple[int, ...], Float[np.ndarray, "*shape"]]
"""Keys from the root of the parameter tree, indices of the leading axes, and the values there."""


def placeholders(shapes: Params) -> Params:
    """The tree with one zero in place of each array."""
    return jax.tree.map(lambda leaf: np.zeros((1,) * len(leaf.shape), np.float32), shapes)


def fill(folder: Path, shapes: Params, pieces: Iterable[Piece]) -> None:
    """Writes the parameters of a checkpoint that was saved with `placeholders`, and its manifest.

    Args:
      folder: of one step.
      shapes: the parameter tree with shapes as leaves.
      pieces: float32; together they cover every array once. An array is stored in pieces like its first one.

    Raises:
      ValueError: an array is not covered exactly once.
      OSError: the disk refuses.
    """
    stores: dict[tuple[str | int, ...], ts.TensorStore] = {}
    missing = {path: int(np.prod(leaf.shape, dtype=np.int64)) for path, leaf in _leaves(shapes).items()}
    for path, position, values in pieces:
        if path not in stores:
            stores[path] = _create(folder / "params", path, _leaves(shapes)[path].shape, len(position))
        stores[path][position].write(values).result()
        missing[path] -= values.size
    wrong = sorted(".".join(map(str, path)) for path, size in missing.items() if size)
    if wrong:
        raise ValueError(f"parameters are not covered once: {', '.join(wrong)}")
    (folder / MANIFEST).unlink(missing_ok=True)
    write_manifest(folder)


def _create(params: Path, path: tuple[str | int, ...], shape: tuple[int, ...], leading: int) -> ts.TensorStore:
    """The array in the form that Orbax gives it, cut along its leading axes."""
    name = ".".join(map(str, path))
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": params.absolute().as_uri(), "path": f"{name}/"},
        "metadata": {
            "shape": list(shape),
            "chunks": [1] * leading + [max(size, 1) for size in shape[leading:]],
            "dtype": "<f4",
            "compressor": {"id": "zstd", "level": 1},
            "fill_value": None,
            "dimension_separator": ".",
        },
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True, delete_existing=True).result()


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> dict[tuple[str | int, ...], Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: leaf for name, branch in tree.items() for key, leaf in _leaves(branch, (*path, name)).items()}
