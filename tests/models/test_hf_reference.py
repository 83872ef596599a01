"""Logits against values recorded from transformers, for installations without torch.

`test_hf_parity.py` proves with torch that the recorded values are what transformers computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trace_jax.models.hf import load_hf_directory

RECORDED = json.loads((Path(__file__).parent / "testdata" / "qwen3_moe_logits.json").read_text())


@pytest.mark.parametrize("experts_implementation", ["dense", "ragged"])
@pytest.mark.parametrize("case", RECORDED)
def test_logits(
    make_checkpoint: Callable[..., Any], unquantized_logits: Callable[..., Any], case: str, experts_implementation: str
) -> None:
    record = RECORDED[case]
    _, config, params = load_hf_directory(make_checkpoint(**record["changes"]).path)
    logits = unquantized_logits(config, params, np.asarray(record["tokens"]), experts_implementation)
    np.testing.assert_allclose(np.asarray(logits), np.asarray(record["logits"], np.float32), rtol=0, atol=1e-4)
