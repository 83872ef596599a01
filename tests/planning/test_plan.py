"""The arithmetic of `trace-jax plan` against published sizes, real arrays and the shapes of real models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.cli.app import main
from trace_jax.errors import UserError
from trace_jax.models.hf import save_hf_directory
from trace_jax.models.policy import Policy
from trace_jax.planning import footprint
from trace_jax.planning.gpus import GPUS, gpu_of
from trace_jax.planning.meshes import fitting_meshes
from trace_jax.planning.models import MODELS, policy_of
from trace_jax.planning.report import make_plan, published_line
from trace_jax.planning.roofline import batch_that_fits, rollouts, speedups, step_seconds
from trace_jax.quantization.plan import rollout_plan

PUBLISHED = policy_of("Qwen3.5-35B-A3B")
ALL, LAST_HALF = tuple(range(40)), tuple(range(20, 40))


def test_published_record_sizes_are_reproduced_exactly() -> None:
    """45 KiB of activations and 5.6 KiB of K and V in full, 7.5 KiB compact; 51 TB a step, 3 minutes at 300 GB/s (arXiv 2610.07767)."""
    full = footprint.record_bytes(PUBLISHED, "nvfp4", "codes", ALL)
    assert full == {"expert_input": 46_080, "k": 2_880, "v": 2_880, "total": 51_840}
    assert (full["expert_input"] / 1024, full["k"] + full["v"]) == (45.0, 5_760)
    compact = footprint.record_bytes(PUBLISHED, "nvfp4", "mantissa", LAST_HALF)
    assert compact["expert_input"] / 1024 == 7.5 and compact["total"] == 7_680 + 960
    step = full["total"] * 4096 * 262_144
    assert round(step / 2**40, 1) == 50.6 and round(step / 300e9) == 186
    assert footprint.record_bytes(PUBLISHED, "mxfp4", "mantissa", LAST_HALF)["expert_input"] == 20 * (256 + 64)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-30B-A3B", 30.53, 3.04),
        ("Qwen3-235B-A22B", 235.09, 21.57),
        ("gpt-oss-120b", 116.83, 5.17),
        ("DeepSeek-V3", 671.03, 36.63),
        ("Qwen3.5-35B-A3B", 34.66, 2.95),
    ],
)
def test_parameters_are_those_of_the_published_models(name: str, total: float, active: float) -> None:
    found = footprint.parameters_of(policy_of(name.upper()))
    assert (round(found.total / 1e9, 2), round(found.active / 1e9, 2)) == (total, active)


def test_cache_bytes_are_those_of_the_engine_s_arrays() -> None:
    for fmt in ("bf16", "nvfp4", "mxfp4"):
        cache = tiny.policy().empty_cache(3, 5, rollout_plan("bf16", "bf16", fmt, fmt))
        arrays = [array for side in (cache.k, cache.v) for array in (side.data, side.scales) if array is not None]
        held = sum(array.nbytes for array in arrays) * (2 / arrays[0].itemsize if fmt == "bf16" else 1)
        assert 3 * 5 * footprint.cache_bytes_per_token(tiny.policy(), fmt) == held
    ratio = footprint.cache_bytes_per_token(PUBLISHED, "bf16") / footprint.cache_bytes_per_token(PUBLISHED, "nvfp4")
    assert round(ratio, 2) == 3.56
    latent = policy_of("DeepSeek-V3")
    assert footprint.cache_bytes_per_token(latent, "nvfp4") == footprint.cache_bytes_per_token(latent, "bf16") == 61 * (512 + 64) * 2


def test_speedup_at_equal_batches_never_exceeds_the_ratio_of_the_bytes() -> None:
    rows = speedups(PUBLISHED, GPUS["B200"], "nvfp4", (1, 16, 256), (1024, 32_768))
    values = [value for row in rows.values() for batch, value in row.items() if batch != "full" and value is not None]
    assert values and all(1 < value < 32 / 9 + 1e-9 for value in values)


def test_a_step_of_one_sequence_reads_k_experts_and_its_cache() -> None:
    policy, gpu = policy_of("Qwen3-30B-A3B"), GPUS["H200"]
    rollout = rollouts(gpu, "nvfp4")["bf16"]
    counts = footprint.parameters_of(policy)
    read = 2 * (counts.experts * 8 / 128 + counts.rest - counts.table) + 1000 * 98_304
    assert step_seconds(policy, gpu, rollout, 1, 1000) == pytest.approx(read / 4.8e12, rel=1e-12)
    assert step_seconds(policy, gpu, rollout, 1, 1000, gpus=4) == pytest.approx(read / 4.8e12 / 4, rel=1e-12)
    fits = batch_that_fits(policy, gpu, rollout, 4096)
    assert fits == int((0.9 * 141e9 - 2 * counts.total) / (4096 * 98_304))


def test_hopper_multiplies_fp4_weights_in_bf16() -> None:
    assert rollouts(GPUS["H200"], "nvfp4")["nvfp4"].products == "bf16"
    assert rollouts(GPUS["B200"], "nvfp4")["nvfp4"].products == "fp4"


def test_meshes_divide_the_model_and_fit() -> None:
    policy = policy_of("Qwen3-30B-A3B")
    found = fitting_meshes(policy, 8, 0.9 * 141e9, "nvfp4")
    assert found and all(int(np.prod(list(fit.sizes.values()))) == 8 for fit in found)
    assert all(768 % (fit.sizes["tensor"] * 16) == 0 and 4 % fit.sizes["tensor"] == 0 for fit in found)
    assert not fitting_meshes(policy, 1, 0.9 * 141e9, "nvfp4")
    assert fitting_meshes(policy, 8, 1e15, "nvfp4")[0].sizes == {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1}


def test_the_published_speedup_is_placed() -> None:
    sizes: dict[str, Any] = {"fmt": "nvfp4", "sequences": 4096, "tokens": 32_768, "layers": "last_half", "record": "mantissa"}
    line = published_line(make_plan(PUBLISHED, GPUS["B200"], train_gpus=8, engine_gpus=1, **sizes))
    assert "published 5.4x" in line and "lies above this curve" in line
    line = published_line(make_plan(policy_of("DeepSeek-V3"), GPUS["H100"], train_gpus=8, engine_gpus=1, **sizes))
    assert "does not fit 1 GPU; take more with --engine-gpus" in line


def test_a_model_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_hf_directory(tmp_path / "model", "qwen3_moe", tiny.CONFIG, tiny.params())
    for source in (tmp_path / "model", tmp_path / "model" / "config.json"):
        assert policy_of(str(source)) == Policy("qwen3_moe", tiny.CONFIG)
    assert main(["plan", str(tmp_path / "model"), "--json", "--gpu", "b200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "not a measurement" in found["note"] and found["parameters"]["total"] == sum(leaf.size for leaf in _leaves(tiny.params()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Qwen4"], "known are: Qwen3-30B-A3B"),
        (["gpt-oss-120b", "--gpu", "A100"], "--gpu A100 is not in the table; write one of: H100"),
        (["gpt-oss-120b", "--format", "int4"], "--format int4 is unknown; write one of: nvfp4, mxfp4"),
        (["gpt-oss-120b", "--record", "bits"], "--record bits is unknown"),
        (["gpt-oss-120b", "--layers", "first"], "first"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_every_known_model_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for name in MODELS:
        assert main(["plan", name, "--gpu", "gb200", "--engine-gpus", "8", "--train-gpus", "64"]) == 0
        assert "not a" in capsys.readouterr().out
    with pytest.raises(UserError):
        gpu_of("")


def _leaves(tree: Any) -> list[Any]:
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]
