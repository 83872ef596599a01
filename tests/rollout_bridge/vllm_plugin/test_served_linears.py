"""NVFP4 linears outside the experts, W4A4 and W4A16: the bytes that vLLM loaded, and products of the activations that vLLM had."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle
from rollout_bridge.export.decode import ExportedFiles
from rollout_bridge.export.layout import DTYPES, TensorSpec
from rollout_bridge.export.shards import ShardWriter
from tests import tiny_policy
from tests.pallas_kernels.cases import BF16
from tests.rollout_bridge.vllm_plugin import served
from trace_jax.quantization.plan import rollout_plan

pytestmark = served.NEEDS_VLLM

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
PLAN = rollout_plan("nvfp4", "bf16", "bf16", "bf16")
INPUT_MULTIPLIER = {"qkv_proj": oracle.decode_multiplier(np.float32(8.0)), "o_proj": oracle.decode_multiplier(np.float32(4.0))}


def quantized_linears(weights: dict[str, np.ndarray]) -> dict[str, oracle.Quantized]:
    """Projections of one layer; those that vLLM fuses share a multiplier."""
    found = {}
    for parts in PARTS.values():
        multiplier = oracle.decode_multiplier(np.max([np.abs(weights[part].astype(np.float32)).max() for part in parts]))
        found |= {part: oracle.quantize(weights[part], NVFP4, multiplier) for part in parts}
    return found


def with_quantized_attention(source: Path, target: Path, activations: bool) -> dict[int, dict[str, oracle.Quantized]]:
    """Copies an export with its attention projections quantized as well; what was written by layer and projection."""
    files = ExportedFiles(source)
    tensors = {name: (dtype, files.read(name)) for name, (dtype, _) in files.declared.items()}
    made = {}
    for layer in tiny_policy.LAYERS:
        prefix = f"model.layers.{layer}.self_attn."
        parts = [part for group in PARTS.values() for part in group]
        made[layer] = quantized_linears({part: tensors.pop(f"{prefix}{part}.weight")[1] for part in parts})
        for fused, names in PARTS.items():
            for part in names:
                q = made[layer][part]
                tensors[f"{prefix}{part}.weight"] = "U8", q.codes
                tensors[f"{prefix}{part}.weight_scale"] = "F8_E4M3", q.scales
                tensors[f"{prefix}{part}.weight_scale_2"] = "F32", np.asarray(q.multiplier, np.float32)
                if activations:
                    tensors[f"{prefix}{part}.input_scale"] = "F32", np.asarray(INPUT_MULTIPLIER[fused], np.float32)
    target.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, target)
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    plan = [TensorSpec(name, dtype, np.shape(value)) for name, (dtype, value) in tensors.items()]
    with ShardWriter(target, plan, 1 << 30) as writer:
        for name, (dtype, value) in tensors.items():
            writer.write(name, np.asarray(value).view(DTYPES[dtype]))
    for name, key in (("config.json", ("quantization_config", "ignore")), ("hf_quant_config.json", ("quantization", "exclude_modules"))):
        config = json.loads((target / name).read_text())
        config[key[0]][key[1]] = [module for module in config[key[0]][key[1]] if ".self_attn." not in module]
        (target / name).write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("linears")
    cases, weights = [], {}
    for mode, activations in (("W4A4", None), ("W4A16", "bf16")):
        source = Path(served.export(folder, f"export-{mode}", activations=activations))
        weights[mode] = with_quantized_attention(source, folder / mode, mode == "W4A4")
        for dtype in ("float32", "bfloat16"):
            options = {"dtype": dtype}
            cases.append(
                {
                    "name": f"{mode}-{dtype}",
                    "model": str(folder / mode),
                    "prompts": served.prompts(4),
                    "options": options,
                    "probe": tuple(PARTS),
                }
            )
    return folder, weights, served.generate(folder, cases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["W4A4", "W4A16"])
def test_products_are_those_of_the_decoded_operands(results, mode: str, dtype: str):
    folder, weights, found = results
    assert "answers" in found[f"{mode}-{dtype}"], found[f"{mode}-{dtype}"]
    other = "W4A16" if mode == "W4A4" else "W4A4"
    with np.load(folder / f"{mode}-{dtype}.npz") as rows:
        for layer in tiny_policy.LAYERS:
            for fused, parts in PARTS.items():
                x, out = (rows[f"model.layers.{layer}.self_attn.{fused}.{side}"] for side in ("in", "out"))
                weight = np.concatenate([oracle.dequantize(weights[mode][layer][part], np.float64) for part in parts])
                x = x if dtype == "float32" else x.astype(BF16)
                rounded = {"W4A4": oracle.fake_quant(x, NVFP4, INPUT_MULTIPLIER[fused]).astype(np.float64), "W4A16": x.astype(np.float64)}
                expected = rounded[mode] @ weight.T
                scale = np.abs(expected).max()
                np.testing.assert_allclose(out, expected, rtol=0, atol=scale * (1e-6 if dtype == "float32" else 2.0**-8))
                assert np.abs(out - rounded[other] @ weight.T).max() > 0.02 * scale  # the other mode is another product


def test_w4a16_log_probs_are_the_trainer_s(results):
    _, weights, found = results
    masters = served.stored_params()
    attention = dict(masters["groups"][0]["attention"])
    for part in (part for parts in PARTS.values() for part in parts):
        decoded = [oracle.dequantize(weights["W4A16"][layer][part], np.float32) for layer in tiny_policy.LAYERS]
        attention[part] = jnp.asarray(np.stack(decoded))
    rounded = masters | {"groups": {0: masters["groups"][0] | {"attention": attention}}}
    batch = served.as_batch(served.prompts(4), found["W4A16-float32"]["answers"])
    gap = tiny_policy.gap(batch, served.trainer(batch, PLAN, "float32", masters=rounded)[0])
    plain = tiny_policy.gap(batch, served.trainer(batch, PLAN, "float32")[0])
    print(served.describe("W4A16 linears", gap), served.describe("control, unrounded weights", plain))
    assert gap.max() <= 1e-4 and plain.mean() > 0.02
