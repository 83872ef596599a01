"""The tensors that the worker expects are those that the trainer sends, and those that it loads are those of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from rollout_bridge.export import ExportSettings
from rollout_bridge.export.layout import tensor_plan
from rollout_bridge.vllm_plugin.weights.expected import Experts, ModelLayout, expected_tensors
from tests import tiny_policy
from tests.tiny_policy import BIASED, CONFIG, PLANS, TIED
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.quantization.plan import rollout_plan
from trace_jax.rollout import weight_sync

BF16_KV = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
W4A16 = rollout_plan("nvfp4", "bf16", "bf16", "bf16")
MXFP4 = rollout_plan("mxfp4", "mxfp4", "bf16", "bf16")


def layout(config: Qwen3MoeConfig = CONFIG, dtype: str = "bfloat16", experts: Experts = "nvfp4", **changes: Any) -> ModelLayout:
    """The layout of an engine that runs the tiny policy."""
    fields = asdict(config)
    same = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_experts", "expert_hidden_size")
    made = ModelLayout(
        dtype=dtype,
        **{name: fields[name] for name in same},
        experts=(experts,) * config.num_layers,
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
        (PLANS["bf16"], CONFIG, "bfloat16", layout(experts="plain", kv_scales=False)),
        (MXFP4, CONFIG, "bfloat16", layout(experts="mxfp4", kv_scales=False)),
        (PLANS["bf16"], BIASED, "bfloat16", layout(BIASED, experts="plain", kv_scales=False)),
    ),
    ids=("nvfp4", "bf16 cache", "W4A16, tied", "bf16", "mxfp4", "biased"),
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


@pytest.mark.parametrize(
    "experts, parameters",
    (
        ("nvfp4", ("weight", "weight_scale", "weight_scale_2", "input_scale")),
        ("mxfp4", ("weight", "weight_scale")),
        ("plain", ("weight",)),
    ),
)
def test_the_experts_fill_every_part_of_vllm_s_parameters_once(experts: Experts, parameters: tuple[str, ...]):
    pytest.importorskip("torch")
    from rollout_bridge.vllm_plugin.weights.targets import expert_targets

    wanted = [
        (layer, f"{stack}_{parameter}", part)
        for layer in range(CONFIG.num_layers)
        for parameter in parameters
        for stack, part in (("w13", "w1"), ("w13", "w3"), ("w2", "w2"))
    ]
    names = expected_tensors(layout(experts=experts))
    assert sorted(target for name in names for target in expert_targets(name)) == sorted(wanted)
    (up,) = expert_targets("model.layers.11.mlp.experts.up_proj.weight_scale_2")
    assert up == (11, "w13_weight_scale_2", "w3")
    assert {name for name in names if expert_targets(name)} == {name for name in names if ".mlp.experts." in name}


@pytest.mark.parametrize("config", (CONFIG, TIED), ids=("untied", "tied"))
def test_the_rest_goes_to_the_loader_of_checkpoints_under_its_names(config: Qwen3MoeConfig):
    torch = pytest.importorskip("torch")
    from rollout_bridge.vllm_plugin.weights.targets import plain_tensors

    tensors = {name: torch.tensor(number) for number, name in enumerate(expected_tensors(layout(config)))}
    sent = dict(tensors)
    loaded = dict(plain_tensors(tensors, config.tie_embeddings))
    assert tensors == {name: tensor for name, tensor in sent.items() if ".mlp.experts." in name}
    plan = {
        spec.name for spec in tensor_plan(tiny_policy.policy(config=config), ExportSettings("nvfp4")) if ".mlp.experts." not in spec.name
    }
    assert set(loaded) == plan | {"lm_head.weight"}
    source = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    assert all(tensor is sent[source if name == "lm_head.weight" else name] for name, tensor in loaded.items())
