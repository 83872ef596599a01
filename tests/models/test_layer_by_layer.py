"""A model that is run one layer at a time gives what the whole model gives, for every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from model_families import FAMILIES, config_of

from trace_jax.models.policy import Policy
from trace_jax.models.registry import init_params
from trace_jax.quantization.calibration import calibrate, calibrate_by_layers

SEQUENCES = [np.random.default_rng(seed).integers(0, 11, 11).tolist() for seed in range(3)]


def reader(params: Any) -> tuple[Callable[..., np.ndarray], list[tuple[Any, ...]]]:
    """Reads a tree as a checkpoint on disk is read, and what was read in order."""
    seen: list[tuple[Any, ...]] = []

    def read(path: tuple[str | int, ...], position: tuple[int, ...] = ()) -> np.ndarray:
        leaf = params
        for key in path:
            leaf = leaf[key]
        seen.append((path, position))
        return np.array(leaf[position])

    return read, seen


@pytest.mark.parametrize("family", FAMILIES)
def test_calibration_equals_that_of_the_whole_model(family: str) -> None:
    config = config_of(family)
    policy = Policy(family, config, "float32")
    params = init_params(family, config, jax.random.key(3))
    whole = calibrate(policy, params, SEQUENCES, 1.0)
    read, seen = reader(params)
    apart = calibrate_by_layers(policy, read, SEQUENCES, 1.0)
    assert apart.keys() == whole.keys()
    for site, values in whole.items():
        np.testing.assert_array_equal(np.asarray(apart[site]), np.asarray(values), err_msg=site)
    layers = [path for path, _ in seen if path[0] == "groups"]
    assert len(layers) == len(set(seen) - {(("embed", "weight"), ())}), "a layer was read twice"
    assert all(position for path, position in seen if path[0] == "groups"), "a whole stack was read"

    other, _ = reader(jax.tree.map(lambda leaf: 5 * leaf, params))  # the control: other magnitudes
    moved = calibrate_by_layers(policy, other, SEQUENCES, 1.0)
    assert not whole or any((np.asarray(moved[site]) != np.asarray(whole[site])).any() for site in whole)
