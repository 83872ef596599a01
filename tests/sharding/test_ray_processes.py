"""Several trainer processes whose engines Ray runs: each process has a pool of its own, of one cluster or of two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sharding.test_processes import SECONDS, metrics_of, outputs_of, start_two

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

RAY = ("rollout.launcher=ray", "rollout.engines=1", "rollout.ray.num_cpus=0.5", "rollout.ray.object_store_gib=0.1")


def completions(out: Path) -> list[str]:
    return [json.loads(line)["completion"] for file in sorted((out / "rollouts").iterdir()) for line in file.read_text().splitlines()]


def test_two_processes_with_engines_on_ray_train_as_one(require, environment, train, tmp_path):
    require("ray")
    one, two = tmp_path / "one", tmp_path / "two"
    outputs_of(start_two(environment, train(two, "steps=2", "mesh.data=2", *RAY)))
    subprocess.run([sys.executable, *train(one, "steps=2")], env=environment, check=True, capture_output=True, timeout=SECONDS)
    assert completions(two) == completions(one)
    for row, alone in zip(metrics_of(two), metrics_of(one), strict=True):
        for name in ("reward/mean", "loss", "grad_norm", "sync/version"):
            if name in alone:
                assert row[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-5), name
