"""One awkward checkpoint and its exports in every format, shared by all tests of the exporter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exported_policy import SHARD_BYTES, Export, awkward, multipliers, save

from rollout_bridge.export import ExportSettings, export_checkpoint
from trace_jax.models.registry import Params


@pytest.fixture(scope="session")
def masters() -> Params:
    return awkward()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory, masters: Params) -> Path:
    """A run directory."""
    return save(tmp_path_factory.mktemp("bridge") / "run", masters, multipliers())


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, run_folder: Path) -> Callable[..., Export]:
    """`exported("nvfp4", scope=..., declare_kv=...)`: a verified export of the run, made once."""
    made: dict[ExportSettings, Export] = {}

    def export(format: str, **choices: str) -> Export:
        settings = ExportSettings(format, **choices)
        if settings not in made:
            path = tmp_path_factory.mktemp("export") / "out"
            made[settings] = Export(path, settings, export_checkpoint(run_folder, path, settings, verify=True, max_shard_bytes=SHARD_BYTES))
        return made[settings]

    return export
