"""Quantized source checkpoints against formulas of their own, layout by layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from model_families import config_of
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from trace_jax.errors import UserError
from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.key_map import nest, parameter_shapes
from trace_jax.models.registry import key_map

E4M3 = ml_dtypes.float8_e4m3fn
GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def gate_of(loaded: Any) -> NDArray[np.float32]:
    return loaded.params["groups"][0]["experts"]["gate"][1, 2]


def packed(codes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Codes two a byte, the first in the low four bits."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Any]) -> Any:
    """Experts of 40 x 64: blocks of 16 and 32 along a row, and a ragged last block of 24 x 24."""
    return make_checkpoint(hidden_size=64, expert_hidden_size=40)


@pytest.fixture
def codes() -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 16, (40, 64))


def fp8_values(rng: np.random.Generator) -> NDArray[Any]:
    return rng.standard_normal((40, 64)).astype(np.float32).astype(E4M3)


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_fp8_in_blocks(checkpoint: Any, stored: Any) -> None:
    rng = np.random.default_rng(1)
    values, scales = fp8_values(rng), rng.uniform(0.01, 2, (2, 3)).astype(stored)
    checkpoint.edit_tensors(set={GATE: values, f"{GATE}_scale_inv": scales})
    checkpoint.edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [24, 24]})
    expected = np.array([[float(values[r, c]) * float(scales[r // 24, c // 24]) for c in range(64)] for r in range(40)], np.float32)
    found = load_hf_directory(checkpoint.path)
    np.testing.assert_array_equal(gate_of(found), expected)
    np.testing.assert_array_equal(found.params["groups"][0]["experts"]["up"], checkpoint.params["groups"][0]["experts"]["up"])


@pytest.mark.parametrize(("method", "shape"), [("modelopt", ()), ("compressed-tensors", (1,)), ("compressed-tensors", (40, 1))])
def test_fp8_with_one_factor_or_one_per_row(checkpoint: Any, method: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(2)
    values, scales = fp8_values(rng), np.asarray(rng.uniform(0.01, 2, shape), np.float32)
    checkpoint.edit_tensors(set={GATE: values, f"{GATE}_scale": scales, GATE.replace("weight", "input_scale"): np.array(3, np.float32)})
    checkpoint.edit_config(quantization_config={"quant_method": method})
    np.testing.assert_array_equal(gate_of(load_hf_directory(checkpoint.path)), values.astype(np.float32) * scales)


@pytest.mark.parametrize("method", ["modelopt", "compressed-tensors"])
def test_nvfp4_multiplies_or_divides_by_the_scale_of_the_tensor(checkpoint: Any, codes: NDArray[np.int64], method: str) -> None:
    scales = np.random.default_rng(3).uniform(1, 400, (40, 4)).astype(E4M3)
    if method == "modelopt":
        tensors, factor = (
            {GATE: packed(codes), f"{GATE}_scale": scales, f"{GATE}_scale_2": np.array(0.0007, np.float32)},
            np.float32(0.0007),
        )
    else:
        tensors = {f"{GATE}_packed": packed(codes), f"{GATE}_scale": scales, f"{GATE}_global_scale": np.array([1500], np.float32)}
        factor = np.float32(1) / np.float32(1500)
    checkpoint.edit_tensors(set=tensors, drop=[GATE] if method != "modelopt" else [])
    checkpoint.edit_config(quantization_config={"quant_method": method})
    expected = np.array([[FP4[codes[r, c]] * (np.float32(scales[r, c // 16]) * factor) for c in range(64)] for r in range(40)], np.float32)
    np.testing.assert_array_equal(gate_of(load_hf_directory(checkpoint.path)), expected)


def test_mxfp4(checkpoint: Any, codes: NDArray[np.int64]) -> None:
    exponents = np.random.default_rng(4).integers(118, 130, (40, 2)).astype(np.uint8)
    expected = np.array([[FP4[codes[r, c]] * 2.0 ** (int(exponents[r, c // 32]) - 127) for c in range(64)] for r in range(40)], np.float32)
    checkpoint.edit_tensors(set={f"{GATE}_packed": packed(codes), f"{GATE}_scale": exponents}, drop=[GATE])
    checkpoint.edit_config(quantization_config={"quant_method": "compressed-tensors"})
    np.testing.assert_array_equal(gate_of(load_hf_directory(checkpoint.path)), expected)


def test_method_that_is_not_read(checkpoint: Any) -> None:
    checkpoint.edit_config(quantization_config={"quant_method": "awq"})
    with pytest.raises(UserError, match=r"quant_method is 'awq'; read are fp8, compressed-tensors, modelopt, mxfp4: take such"):
        load_hf_directory(checkpoint.path)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (np.ones((2, 2), np.float32), r"gate_proj.weight: scales of shape \(2, 2\) instead of \(2, 3\); the checkpoint is damaged"),
        (np.full((2, 3), np.nan, np.float32), "gate_proj.weight holds NaN"),
        (None, "gate_proj.weight has type F8_E4M3 and config.json no quantization_config that explains it"),
    ],
    ids=["shape", "nan", "missing"],
)
def test_scales_that_do_not_fit(checkpoint: Any, scales: Any, message: str) -> None:
    tensors = {GATE: fp8_values(np.random.default_rng(5))} | ({} if scales is None else {f"{GATE}_scale_inv": scales})
    checkpoint.edit_tensors(set=tensors)
    checkpoint.edit_config(quantization_config={"quant_method": "fp8", "weight_block_size": [24, 24]})
    with pytest.raises(UserError, match=message):
        load_hf_directory(checkpoint.path)


def test_integers_are_refused(checkpoint: Any) -> None:
    checkpoint.edit_tensors(set={GATE: np.ones((40, 64), np.int8), f"{GATE}_scale": np.ones((40, 1), np.float32)})
    checkpoint.edit_config(quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(UserError, match="has type I8; take a checkpoint whose weights are of BF16"):
        load_hf_directory(checkpoint.path)


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    """Blocks along the rows of the matrices that the unquantized files hold transposed; rows of gate and up take turns."""
    config = config_of("gpt_oss", hidden_size=64, expert_hidden_size=32, num_layers=1, num_experts=3)
    shapes = parameter_shapes(key_map("gpt_oss", config))
    rng = np.random.default_rng(5)
    params = nest({path: rng.integers(-9, 9, shape).astype(np.float32) for path, shape in shapes.items()})
    save_hf_directory(tmp_path / "plain", "gpt_oss", config, params)
    tensors, stored = load_file(tmp_path / "plain" / "model.safetensors"), {}
    prefix = "model.layers.0.mlp.experts."
    for name, rows, width in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        codes, exponents = rng.integers(0, 16, (3, rows, width)), rng.integers(118, 130, (3, rows, width // 32)).astype(np.uint8)
        del tensors[prefix + name]
        tensors |= {
            f"{prefix}{name}_blocks": packed(codes).reshape(3, rows, width // 32, 16),
            f"{prefix}{name}_scales": exponents,
        }
        stored[name] = np.asarray(FP4, np.float32)[codes] * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=-1)
    content = json.loads((tmp_path / "plain" / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "mxfp4").mkdir()
    save_file(tensors, tmp_path / "mxfp4" / "model.safetensors")
    (tmp_path / "mxfp4" / "config.json").write_text(json.dumps(content))
    group = load_hf_directory(tmp_path / "mxfp4").params["groups"][0]
    expected = {"gate": stored["gate_up_proj"][:, 0::2], "up": stored["gate_up_proj"][:, 1::2], "down": stored["down_proj"]}
    for name, values in expected.items():
        np.testing.assert_array_equal(group["experts"][name][0], values)
    np.testing.assert_array_equal(group["expert_biases"]["up"], params["groups"][0]["expert_biases"]["up"])
