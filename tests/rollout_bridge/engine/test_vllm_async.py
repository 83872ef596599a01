"""An asynchronous training run with vLLM whose worker is killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON
from tests.train.conftest import VALUES
from tests.train.invariants import answers_of, violations
from trace_jax.config import from_mapping
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.run import run_training

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]


def worker() -> int:
    """The vLLM worker that this process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"rollout_bridge.vllm_plugin.serve" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    (pid,) = found
    return pid


def test_kill_9_of_vllm_in_an_asynchronous_run(installed: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Sequences go on under new weights, no prompt is lost or used twice, and no token is older than allowed; SIGTERM kills no worker."""
    config = from_mapping(
        VALUES,
        [
            *("rollout.engine=vllm", f"rollout.vllm.python={INTERPRETER}", "sync.max_staleness=1", "rollout.max_new_tokens=16"),
            *("model.config.head_dim=32", "steps=6", "eval.every=3"),
        ],
    )

    def kill(step: int, metrics: dict) -> None:
        if step in (1, 2):
            os.kill(worker(), signal.SIGTERM if step == 1 else signal.SIGKILL)

    run_training(config, tmp_path / "run", report=kill)
    died = [line for line in capfd.readouterr().err.splitlines() if "worker died" in line]
    assert len(died) == 1 and "killed by SIGKILL" in died[0]
    assert violations(tmp_path / "run") == []
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["sync/regenerated"] for row in rows] == [0] * 6 and all(row["guidance/missing_fraction"] == 0 for row in rows)
    assert max(row["sync/staleness"] for row in rows) == 1 and max(row["sync/mixed_fraction"] for row in rows) > 0
    versions = [answer["weight_version"] for row in rows for answer in answers_of(tmp_path / "run", row["step"])]
    assert any(first < last for first, last in versions) and all(np.isfinite(row["loss"]) for row in rows)
