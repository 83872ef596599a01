"""An export holds the experts of one layer, whatever the number of layers."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from exported_policy import random_params, save
from tiny_policy import CONFIG

from rollout_bridge.export import ExportSettings, export_checkpoint, verify_export
from rollout_bridge.export.experts import block_size
from rollout_bridge.export.memory import resident_bytes
from trace_jax.models.registry import param_shapes
from trace_jax.quantization.plan import SITES
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.stored_policy import StoredParams, open_stored_policy


class Watched:
    """Counts the bytes of arrays that were read from disk and are still held by someone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.held = self.most = 0
        read = StoredParams.read

        def watched(params: StoredParams, *place: Any) -> np.ndarray:
            array = read(params, *place)
            self.held += array.nbytes
            self.most = max(self.most, self.held)
            weakref.finalize(array, self._released, array.nbytes)
            return array

        monkeypatch.setattr(StoredParams, "read", watched)

    def _released(self, count: int) -> None:
        self.held -= count


def test_no_more_than_one_layer_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None) -> None:
    config = replace(CONFIG, num_layers=8)
    folder = save(tmp_path / "run", random_params(config), {site: np.ones(8, np.float32) for site in SITES}, config)
    layer = 4 * 3 * config.num_experts * config.hidden_size * config.expert_hidden_size
    largest_other = 4 * config.vocab_size * config.hidden_size
    watched = Watched(monkeypatch)
    settings = ExportSettings("nvfp4", "routed_experts:first:4")
    export_checkpoint(folder, tmp_path / "out", settings)
    assert layer <= watched.most <= layer + largest_other
    stored = open_stored_policy(folder)
    scales = {site: np.asarray(values) for site, values in stored.multipliers.items()}
    watched.most = 0
    verify_export(tmp_path / "out", stored.policy, settings, stored.params, scales)
    assert layer <= watched.most <= layer + largest_other
    kept = [stored.params.read(("groups", 0, "experts", "gate"), (index,)) for index in range(8)]
    assert watched.most > 2 * layer and len(kept) == 8  # the control: what a program keeps is seen


def test_layers_are_stored_one_by_one(tmp_path: Path) -> None:
    """A read of one layer decodes one piece, so it must not hold the others."""
    folder = save(tmp_path / "run", random_params(), {site: np.ones(3, np.float32) for site in SITES})
    stored = open_stored_policy(folder).params
    assert isinstance(stored, StoredParams)
    for path in (("groups", 0, "experts", "up"), ("groups", 0, "attention", "q_proj"), ("groups", 0, "input_norm")):
        array = stored._open(path)
        assert array.chunk_layout.read_chunk.shape == (1, *array.shape[1:])


@pytest.mark.parametrize(("experts", "values", "size"), [(128, 4_718_592, 1), (6, 6144, 6), (48, 196_608, 8), (7, 1 << 20, 1)])
def test_blocks_of_experts_are_small_and_equal(experts: int, values: int, size: int) -> None:
    assert block_size(experts, values) == size


def grown(work: Callable[[], Any]) -> int:
    """Bytes by which the peak of this process exceeds what it held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed must not hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_bytes()
    kept = work()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    del kept
    return int(peak.split()[1]) * 1024 - before


@pytest.mark.slow
def test_resident_memory_does_not_follow_the_layers(tmp_path: Path) -> None:
    layers = 12
    config = replace(CONFIG, num_layers=layers, num_experts=24, hidden_size=256, expert_hidden_size=256)
    block = np.random.default_rng(0).standard_normal((256, 256)).astype(np.float32)
    tree = jax.tree.map(lambda leaf: np.resize(block, leaf.shape), param_shapes("qwen3_moe", config))
    layer_bytes = 4 * 3 * config.num_experts * 256 * 256
    folder = save(tmp_path / "run", tree, {site: np.ones(layers, np.float32) for site in SITES}, config)
    del tree

    export_checkpoint(folder, tmp_path / "warm", ExportSettings("nvfp4", "routed_experts:0"))  # compiles
    streamed = grown(lambda: export_checkpoint(folder, tmp_path / "out", ExportSettings("nvfp4", "routed_experts:last:2")))
    whole = grown(lambda: load_policy(folder))
    assert whole > layers * layer_bytes  # the control sees what holding the model costs
    assert streamed < 8 * layer_bytes  # one layer, and a constant that these small layers do not hide
