"""The measurement of weight updates runs against a real vLLM; its figures are those of whole updates."""

from __future__ import annotations

import math

import pytest

from rollout_bridge.engine.sync_throughput import PLAN, measure
from tests import tiny_policy
from tests.rollout_bridge.engine.tiny_setup import INTERPRETER, REASON
from trace_jax.rollout.weight_sync import expected_tensors

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not INTERPRETER, reason=REASON)]


def test_every_stage_of_an_update_is_timed():
    found = measure(INTERPRETER, tiny_policy.CONFIG, updates=1)
    sizes = {"uint8": 1, "bfloat16": 2, "float32": 4}
    tensors = expected_tensors(tiny_policy.policy(), PLAN).values()
    assert found["gb"] == round(sum(sizes[dtype] * math.prod(shape) for dtype, shape in tensors) / 1e9, 6)
    stages = ("quantize", "send", "receive", "check", "load")
    assert all(found[stage] > 0 for stage in stages)
    assert found["total_cpu"] == pytest.approx(sum(found[f"{stage}_cpu"] for stage in stages), rel=0.01)
