"""Strict reading of Hugging Face directories: every parameter filled, every key accounted for, every damage named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.models.hf import load_hf_directory
from trace_jax.models.key_map import parameter_shapes
from trace_jax.models.qwen3_moe.params import key_map
from trace_jax.models.registry import param_shapes

EXPERTS = "model.layers.{}.mlp.experts"
ROUTER = "model.layers.0.mlp.gate.weight"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
GOLDEN = Path(__file__).parent / "testdata" / "qwen3_moe_key_map.json"


def assert_trees_equal(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def fuse(tensors: dict[str, np.ndarray], layer: int, experts: int, transposed: bool = False) -> tuple[dict[str, np.ndarray], list[str]]:
    """The fused tensors of a layer, and the names they replace."""
    prefix = EXPERTS.format(layer)

    def stack(name: str) -> np.ndarray:
        return np.stack([tensors[f"{prefix}.{e}.{name}_proj.weight"] for e in range(experts)])

    gate_up = np.concatenate([stack("gate"), stack("up")], axis=1)
    fused = {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": stack("down")}
    if transposed:
        fused = {name: np.ascontiguousarray(value.swapaxes(1, 2)) for name, value in fused.items()}
    return fused, [name for name in tensors if name.startswith(f"{prefix}.")]


def test_key_map_is_the_reviewed_one(make_checkpoint: Callable[..., Any]) -> None:
    config = make_checkpoint(num_experts=2, attention_bias=True).config
    ours = {e.name: {"path": ".".join(map(str, e.path)), "position": list(e.position), "shape": list(e.shape)} for e in key_map(config)}
    assert ours == json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("tie_embeddings", [False, True])
@pytest.mark.parametrize("attention_bias", [False, True])
def test_key_map_covers_our_tree_exactly_once(make_checkpoint: Callable[..., Any], tie_embeddings: bool, attention_bias: bool) -> None:
    config = make_checkpoint(tie_embeddings=tie_embeddings, attention_bias=attention_bias).config
    times = {path: np.zeros(shape, np.int64) for path, shape in parameter_shapes(key_map(config)).items()}
    for entry in key_map(config):
        assert times[entry.path][entry.position].shape == entry.shape
        times[entry.path][entry.position] += 1
    assert all((count == 1).all() for count in times.values())
    assert len({entry.name for entry in key_map(config)}) == len(key_map(config))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "attention_bias": True}], ids=["plain", "tied_with_bias"])
def test_tree_is_the_one_the_model_has(make_checkpoint: Callable[..., Any], changes: dict[str, Any]) -> None:
    checkpoint = make_checkpoint(**changes)
    params = load_hf_directory(checkpoint.path).params
    model = param_shapes("qwen3_moe", checkpoint.config)
    assert jax.tree.structure(params) == jax.tree.structure(model)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), model)


def test_hf_01_reads_back_what_was_written(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    family, config, params = load_hf_directory(checkpoint.path)
    assert (family, config) == ("qwen3_moe", checkpoint.config)
    assert_trees_equal(params, checkpoint.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("source", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_reads_every_float_type(make_checkpoint: Callable[..., Any], source: Any) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_tensors(set={name: value.astype(source) for name, value in checkpoint.tensors().items()})
    assert_trees_equal(load_hf_directory(checkpoint.path).params, checkpoint.params)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("hidden_size, expert_hidden_size", [(8, 5), (8, 8), (8, 4)], ids=["plain", "down_square", "gate_up_square"])
def test_hf_03_fused_and_per_expert_layouts_are_equal(
    make_checkpoint: Callable[..., Any], transposed: bool, hidden_size: int, expert_hidden_size: int
) -> None:
    checkpoint = make_checkpoint(hidden_size=hidden_size, expert_hidden_size=expert_hidden_size)
    tensors = checkpoint.tensors()
    for layer in range(2):
        fused, replaced = fuse(tensors, layer, 3, transposed)
        checkpoint.edit_tensors(set=fused, drop=replaced)
    assert_trees_equal(load_hf_directory(checkpoint.path).params, checkpoint.params)


def test_hf_03_one_layer_may_be_fused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    fused, replaced = fuse(checkpoint.tensors(), 1, 3)
    checkpoint.edit_tensors(set=fused, drop=replaced)
    assert_trees_equal(load_hf_directory(checkpoint.path).params, checkpoint.params)


def test_hf_03_experts_in_both_layouts_are_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_tensors(set=fuse(checkpoint.tensors(), 0, 3)[0])
    with pytest.raises(UserError, match=r"both fused and one by one: model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight.* and 1 more"):
        load_hf_directory(checkpoint.path)


def test_hf_03_forms_that_contradict_are_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    fused, replaced = fuse(checkpoint.tensors(), 0, 3)
    down = f"{EXPERTS.format(0)}.down_proj"
    checkpoint.edit_tensors(set={**fused, down: np.ascontiguousarray(fused[down].swapaxes(1, 2))}, drop=replaced)
    with pytest.raises(UserError, match=r"wrong shape: .*gate_up_proj is \(3, 10, 8\).*down_proj is \(3, 5, 8\)"):
        load_hf_directory(checkpoint.path)


def test_hf_03_half_a_fused_layer_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    fused, replaced = fuse(checkpoint.tensors(), 0, 3)
    checkpoint.edit_tensors(set=fused, drop=[*replaced, f"{EXPERTS.format(0)}.gate_up_proj"])
    with pytest.raises(UserError, match=r"lacks model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load_hf_directory(checkpoint.path)


def test_hf_02_tied_without_head(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(tie_embeddings=True)
    assert HEAD not in checkpoint.tensors()
    params = load_hf_directory(checkpoint.path).params
    assert "lm_head" not in params
    assert_trees_equal(params, checkpoint.params)


def test_hf_02_tied_with_an_equal_head(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(tie_embeddings=True)
    checkpoint.edit_tensors(set={HEAD: checkpoint.tensors()[EMBED]})
    params = load_hf_directory(checkpoint.path).params
    assert "lm_head" not in params
    assert_trees_equal(params, checkpoint.params)


def test_hf_02_tied_with_another_head_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(tie_embeddings=True)
    checkpoint.edit_tensors(set={HEAD: -checkpoint.tensors()[EMBED]})
    with pytest.raises(UserError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        load_hf_directory(checkpoint.path)


def test_hf_02_untied_with_a_head(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    params = load_hf_directory(checkpoint.path).params
    np.testing.assert_array_equal(params["lm_head"]["weight"], checkpoint.params["lm_head"]["weight"])
    assert not np.array_equal(params["lm_head"]["weight"], params["embed"]["weight"])


def test_hf_02_untied_without_head_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_tensors(drop=[HEAD])
    with pytest.raises(UserError, match=r"lacks lm_head\.weight.*tie_word_embeddings: true"):
        load_hf_directory(checkpoint.path)


def test_hf_06_norms_bias_and_head_dim_land_where_they_belong(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(attention_bias=True)
    tensors, params = checkpoint.tensors(), load_hf_directory(checkpoint.path).params
    attention = params["groups"][0]["attention"]
    assert attention["q_proj"].shape == (2, 4 * 6, 8), "head_dim 6 is not 8 / 4"
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        for letter in "qk":
            np.testing.assert_array_equal(attention[f"{letter}_norm"][layer], tensors[f"{prefix}.{letter}_norm.weight"].astype(np.float32))
        for letter in "qkvo":
            np.testing.assert_array_equal(attention[f"{letter}_bias"][layer], tensors[f"{prefix}.{letter}_proj.bias"].astype(np.float32))
            np.testing.assert_array_equal(attention[f"{letter}_proj"][layer], tensors[f"{prefix}.{letter}_proj.weight"].astype(np.float32))


def test_hf_06_bias_without_attention_bias_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(attention_bias=True)
    checkpoint.edit_config(attention_bias=False)
    with pytest.raises(UserError, match=r"has unknown model\.layers\.0\.self_attn\.k_proj\.bias"):
        load_hf_directory(checkpoint.path)


def test_rotary_buffers_are_ignored(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_tensors(set={"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)})
    assert_trees_equal(load_hf_directory(checkpoint.path).params, checkpoint.params)


@pytest.mark.parametrize(
    "edit, message",
    [
        ({"drop": [ROUTER]}, r"lacks model\.layers\.0\.mlp\.gate\.weight;"),
        ({"set": {"model.layers.9.mlp.gate.weight": np.ones(2, np.float32)}}, r"has unknown model\.layers\.9\.mlp\.gate\.weight;"),
        (
            {"drop": [ROUTER], "set": {"router": np.ones(2, np.float32)}},
            r"lacks model\.layers\.0\.mlp\.gate\.weight and has unknown router;",
        ),
        ({"set": {ROUTER: np.ones((8, 3), np.float32)}}, r"wrong shape: model\.layers\.0\.mlp\.gate\.weight is \(8, 3\), not \(3, 8\)"),
        (
            {"set": {ROUTER: np.full((3, 8), np.nan, np.float32)}},
            r"model\.safetensors: model\.layers\.0\.mlp\.gate\.weight holds NaN or infinity",
        ),
        ({"set": {ROUTER: np.full((3, 8), np.inf, ml_dtypes.bfloat16)}}, r"model\.layers\.0\.mlp\.gate\.weight holds NaN or infinity"),
        (
            {"set": {ROUTER: np.ones((3, 8), np.uint8)}},
            r"model\.layers\.0\.mlp\.gate\.weight has type U8 and config.json no quantization_config .* import the unquantized",
        ),
    ],
    ids=["missing", "unknown", "renamed", "transposed", "nan", "infinity", "type"],
)
def test_bad_tensors_are_named(make_checkpoint: Callable[..., Any], edit: dict[str, Any], message: str) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_tensors(**edit)
    with pytest.raises(UserError, match=message) as caught:
        load_hf_directory(checkpoint.path)
    assert str(checkpoint.path) in str(caught.value) and "\n" not in str(caught.value)


def test_more_layers_than_config_says_are_refused(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_config(num_hidden_layers=1)
    with pytest.raises(UserError, match=r"has unknown model\.layers\.1\..* and \d+ more"):
        load_hf_directory(checkpoint.path)


def test_missing_directory_and_config(tmp_path: Path, make_checkpoint: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory"):
        load_hf_directory(tmp_path / "nowhere")
    checkpoint = make_checkpoint()
    (checkpoint.path / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json does not exist"):
        load_hf_directory(checkpoint.path)


@pytest.mark.parametrize(
    "text, message", [("{", "not readable JSON"), ("[]", "holds no JSON object"), ('{"model_type": "gpt2"}', "'gpt2'.*qwen3_moe")]
)
def test_bad_config_files(make_checkpoint: Callable[..., Any], text: str, message: str) -> None:
    checkpoint = make_checkpoint()
    (checkpoint.path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"config\.json.*" + message):
        load_hf_directory(checkpoint.path)


def test_config_errors_name_the_directory(make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint()
    checkpoint.edit_config(rope_scaling={"type": "yarn", "factor": 4.0})
    with pytest.raises(UserError, match=rf"{checkpoint.path}: config\.json: rope_scaling\.type is 'yarn'"):
        load_hf_directory(checkpoint.path)
