"""What the tensor-parallel workers of one engine say must be the same; the rest needs a real engine (`test_vllm_parallel.py`)."""

from __future__ import annotations

import pytest

from rollout_bridge.vllm_plugin.workers import agreed


def test_workers_that_differ_end_the_engine():
    assert agreed([(3, "ab"), (3, "ab")], "the weights in use") == (3, "ab") and agreed([None], "anything") is None
    with pytest.raises(RuntimeError, match=r"differ in the weights in use: \(3, 'ab'\), \(3, 'ac'\); start the engine again"):
        agreed([(3, "ab"), (3, "ac")], "the weights in use")
