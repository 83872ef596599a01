"""The tensors that the worker expects are those that the trainer sends, and those that it loads are those of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from rollout_bridge.export import ExportSettings
from rollout_bridge.export.layout import tensor_plan
from rollout_bridge.vllm_plugin.weights.expected import ModelLayout, expected_tensors
from tests import tiny_policy
from tests.rollout_bridge.engine.weight_updates import update
from tests.tiny_policy import BIASED, CONFIG, PLANS, TIED
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.quantization.plan import rollout_plan
from trace_jax.rollout import weight_sync

BF16_KV = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
W4A16 = rollout_plan("nvfp4", "bf16", "bf16", "bf16")


def layout(config: Qwen3MoeConfig = CONFIG, dtype: str = "bfloat16", quantized: bool = True, **changes: Any) -> ModelLayout:
    """The layout of an engine that runs the tiny policy."""
    fields = asdict(config)
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts", "expert_hidden_size")
    made = ModelLayout(
        dtype=dtype,
        **{name: fields[name] for name in same},
        quantized=(quantized,) * config.num_layers,
        tied=config.tie_embeddings,
        qkv_bias=config.attention_bias,
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    "plan, config, dtype, expected",
    (
        (PLANS["nvfp4"], CONFIG, "bfloat16", layout(required_kv=("k", "v"))),
        (BF16_KV, CONFIG, "float32", layout(dtype="float32", kv_scales=False)),
        (W4A16, TIED, "bfloat16", layout(TIED, kv_scales=False, input_scales=False)),
        (PLANS["bf16"], CONFIG, "bfloat16", layout(quantized=False, kv_scales=False)),
        (PLANS["bf16"], BIASED, "bfloat16", layout(BIASED, quantized=False, kv_scales=False)),
    ),
    ids=("nvfp4", "bf16 cache", "W4A16, tied", "bf16", "biased"),
)
def test_the_list_is_the_trainer_s(plan, config, dtype, expected):
    found = {name: (spec.dtype, spec.shape) for name, spec in expected_tensors(expected).items() if spec.required}
    sent = weight_sync.expected_tensors(tiny_policy.policy(dtype, config), plan)
    if config.attention_bias:  # vLLM has no such bias, so the update of a model that has it is refused
        sent = {name: tensor for name, tensor in sent.items() if not name.endswith("o_proj.bias")}
        assert len(sent) + config.num_layers == len(weight_sync.expected_tensors(tiny_policy.policy(dtype, config), plan))
    assert found == sent


def test_scales_of_the_cache_are_optional_until_the_cache_needs_them():
    names = {f"model.layers.{layer}.self_attn.{site}_proj.{site}_scale" for layer in range(CONFIG.num_layers) for site in "kv"}
    optional = {name for name, spec in expected_tensors(layout()).items() if not spec.required}
    assert optional == names
    assert {name for name in names if expected_tensors(layout(required_kv=("v",)))[name].required} == {n for n in names if "v_scale" in n}


@pytest.mark.parametrize("format, config", (("nvfp4", CONFIG), ("bf16", TIED)), ids=("nvfp4", "bf16, tied"))
def test_the_loader_gets_the_tensors_of_a_checkpoint(format: str, config: Qwen3MoeConfig):
    torch = pytest.importorskip("torch")
    from rollout_bridge.vllm_plugin.weights.unstack import loader_tensors
    from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import to_numpy, to_torch

    sent = {name: np.asarray(tensor) for one in update(PLANS[format], config=config) for name, tensor in one.tensors.items()}
    tensors = {name: to_torch(tensor) for name, tensor in sent.items()}
    loaded = dict(loader_tensors(tensors, layout(config, quantized=format == "nvfp4")))
    assert not tensors

    types = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}
    plan = {spec.name: (types[spec.dtype], spec.shape) for spec in tensor_plan(tiny_policy.policy(config=config), ExportSettings(format))}
    if config.tie_embeddings:
        plan["lm_head.weight"] = plan["model.embed_tokens.weight"]
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()} == plan
    for name, tensor in loaded.items():
        source, expert = _source(name, config.tie_embeddings)
        expected = sent[source] if expert is None or sent[source].ndim == 0 else sent[source][expert]
        bits = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        assert np.array_equal(to_numpy(bits), expected), name


def _source(name: str, tied: bool) -> tuple[str, int | None]:
    """The tensor of the update that a tensor of the checkpoint comes from, and the expert."""
    if name == "lm_head.weight" and tied:
        return "model.embed_tokens.weight", None
    prefix, mark, rest = name.partition(".mlp.experts.")
    if not mark:
        return name, None
    expert, _, part = rest.partition(".")
    part = "input_scale" if part in ("gate_proj.input_scale", "up_proj.input_scale") else part
    return f"{prefix}{mark}{part}", int(expert)
