"""Weights in Ray's object store: put there once, read by every engine, on its host from shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import ray  # pyright: ignore[reportMissingImports]

from trace_jax.rollout.weight_update import LayerUpdate


@dataclass(frozen=True, eq=False)
class StoredWeights:
    """A complete set of weights.

    Args:
      version: of the weights.
      layers: a reference to each layer, which stays in the store as long as one of them exists.
    """

    version: int
    layers: tuple[Any, ...]


def store(updates: Iterable[LayerUpdate], version: int) -> StoredWeights:
    """Puts an update into the object store, layer by layer."""
    return StoredWeights(version, tuple(ray.put((update.layer_id, _bytes_of(update))) for update in updates))


def stored_layers(weights: StoredWeights) -> Iterator[LayerUpdate]:
    """The layers, one after the other; their arrays are read-only views of the store."""
    for reference in weights.layers:
        layer_id, tensors = ray.get(reference)
        yield LayerUpdate(layer_id, {name: array.view(jnp.dtype(dtype)) for name, (dtype, array) in tensors.items()})


def _bytes_of(update: LayerUpdate) -> dict[str, tuple[str, np.ndarray]]:
    """Tensors as unsigned integers: NumPy pickles BF16 and other foreign dtypes by copying, and only plain ones are read in place."""
    arrays = {name: np.ascontiguousarray(np.asarray(tensor)).reshape(np.shape(tensor)) for name, tensor in update.tensors.items()}
    return {name: (array.dtype.name, array.view(f"u{array.dtype.itemsize}")) for name, array in arrays.items()}
