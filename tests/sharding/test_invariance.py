"""A mesh changes neither the loss, the gradients, the log-probabilities nor a byte of the quantized weights."""

from __future__ import annotations

from typing import Any

import pytest

FLOAT32 = {"logp": 5e-6, "gradient": 5e-6, "loss": 1e-6, "moments": 1e-6, "parity": 0.0}
"""Largest differences to one device; those of gradient and moments as shares of the largest gradient. One in 2^24 is 6e-8."""

BFLOAT16 = {"logp": 0.05, "gradient": 0.03, "loss": 1e-3, "moments": 0.003, "parity": 400.0}
"""In BF16 the sums of several devices are rounded apart, and a value may fall on the other side of an FP4 boundary."""


def assert_invariant(found: dict[str, dict[str, Any]], tolerances: dict[str, float]) -> None:
    control = found.pop("control")
    assert found
    for mesh, differences in found.items():
        assert differences["bytes"] and differences["counts"], mesh
        too_large = {name: differences[name] for name, limit in tolerances.items() if differences[name] > limit}
        assert not too_large, (mesh, too_large)
    # The experts of one half of the devices on the other half: far outside, so that the tolerances mean something.
    assert not control["bytes"]
    assert all(control[name] > 10 * tolerances[name] for name in ("logp", "gradient", "loss", "moments"))


@pytest.mark.parametrize(
    "group",
    ["ragged", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "more", "more_ragged", "per_token", "mxfp4", "fp8"))],
)
def test_mis_01_exp_04_len_01_meshes_equal_one_device(run_program, group):
    """Float32 compute. Data, fsdp, expert and tensor axes; both ways of the experts; multipliers per expert and per token."""
    assert_invariant(run_program("on_meshes.py", group)[group], FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["olmoe", "glm4_moe", "deepseek_v3", "qwen3_5_moe", "gpt_oss", "gpt_oss dense"])
def test_other_families(run_program, group):
    """Norms over all heads, dense and shared experts, latent and linear attention, biases of experts and sinks."""
    recurrent = {"gradient": 3e-5, "moments": 3e-6} if group == "qwen3_5_moe" else {}  # a state passes through all tokens
    assert_invariant(run_program("on_meshes.py", f"family {group}")[f"family {group}"], FLOAT32 | recurrent)


@pytest.mark.slow
def test_bfloat16_compute(run_program):
    assert_invariant(run_program("on_meshes.py", "bf16_compute")["bf16_compute"], BFLOAT16)


def test_rows_that_travel_by_ragged_all_to_all(run_program):
    """The offsets are those of the collective, which runs on GPUs only: written out with an all-gather, and lowered for CUDA."""
    found = run_program("on_meshes.py", "transports")["transports"]
    assert found["lowers"] and found["difference"] < 1e-5 and found["control"] > 0.1
