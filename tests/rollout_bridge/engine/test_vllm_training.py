"""A short training run whose answers come from vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON
from tests.train.conftest import VALUES
from trace_jax.config import from_mapping
from trace_jax.train.run import run_training

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]


def test_training_with_vllm(installed: None, tmp_path: Path):
    """Routes are replayed, and expert inputs, keys and values guided by what vLLM captured."""
    config = from_mapping(
        VALUES,
        [
            *("rollout.engine=vllm", f"rollout.vllm.python={INTERPRETER}"),
            *("model.config.head_dim=32", "steps=2", "eval.every=2"),
        ],
    )
    rows = {}
    run_training(config, tmp_path / "run", report=lambda step, metrics: rows.setdefault(step, metrics))
    assert [rows[step]["sync/version"] for step in (1, 2)] == [1, 2]
    for step in (1, 2):
        assert rows[step]["sync/staleness"] == 0 and rows[step]["guidance/missing_fraction"] == 0
        # Log-probs of answers drawn with the weights of each step, in the trainer's forward under the captured codes and routes.
        assert rows[step]["train_rollout_logprob_abs_diff_max"] <= 1e-4
    assert rows[2]["eval/validation/precision"] == "nvfp4"
    assert min(value for name, value in rows[2].items() if name.startswith("guidance/audit/code_agreement")) > 0.99
    assert (tmp_path / "run" / "vllm.log").stat().st_size > 0
