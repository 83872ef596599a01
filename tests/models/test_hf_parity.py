"""Logits and gradients against transformers' Qwen3MoeForCausalLM on tiny random checkpoints that transformers saved itself.

Run with `-s` to see the largest difference of each case.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.key_map import file_shapes
from trace_jax.models.qwen3_moe.params import key_map

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RECORDED = Path(__file__).parent / "testdata" / "qwen3_moe_logits.json"
OurLogits: TypeAlias = Callable[..., jax.Array]

TOLERANCE = 1e-4
TOKENS = np.random.default_rng(7).integers(0, 53, (2, 19))

SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}

CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "norm_topk_prob_off": {"norm_topk_prob": False},
    "attention_bias": {"attention_bias": True},
    "head_dim_explicit": {"head_dim": 24},
    "rope_theta_1e6": {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}},
    "rms_norm_eps_1e-2": {"rms_norm_eps": 1e-2},
    "one_kv_head": {"num_key_value_heads": 1},
    "all_experts": {"num_experts_per_tok": 6},
    "square_experts": {"moe_intermediate_size": 32},
    "tied_bias_head_dim_no_norm_topk": {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16, "norm_topk_prob": False},
}


def oracle(**changes: Any) -> Any:
    """A transformers model in float32 of which every parameter, norms and biases included, is random."""
    config = transformers.Qwen3MoeConfig(**{**SHAPE, **changes}, attn_implementation="eager", experts_implementation="eager")
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def oracle_logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.numpy()


def check(label: str, expected: np.ndarray, actual: jax.Array) -> None:
    difference = float(np.max(np.abs(expected - np.asarray(actual))))
    print(f"\n| {label} | {difference:.2e} | {np.abs(expected).max():.2f} |", end="")
    assert difference <= TOLERANCE


def rewrite_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def to_published_spelling(content: dict[str, Any]) -> None:
    """Turns what transformers 5 writes into the keys of transformers 4."""
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]
    content["rope_scaling"] = None
    content["num_experts"] = content.pop("num_local_experts")
    content["torch_dtype"] = content.pop("dtype")


@pytest.mark.parametrize(
    "case, experts_implementation",
    [(case, "dense") for case in CASES] + [("untied", "ragged"), pytest.param("norm_topk_prob_off", "ragged", marks=pytest.mark.slow)],
)
def test_logits(tmp_path: Path, unquantized_logits: OurLogits, case: str, experts_implementation: str) -> None:
    model = oracle(**CASES[case])
    model.save_pretrained(tmp_path)
    _, config, params = load_hf_directory(tmp_path)
    check(f"{case}, {experts_implementation}", oracle_logits(model), unquantized_logits(config, params, TOKENS, experts_implementation))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("spelling", ["transformers_5", "published"])
@pytest.mark.parametrize("layout", ["per_expert", "fused", "fused_transposed"])
def test_hf_03_logits_of_every_layout_and_spelling(
    tmp_path: Path, unquantized_logits: OurLogits, layout: str, spelling: str, tie: bool
) -> None:
    model = oracle(tie_word_embeddings=tie)
    model.save_pretrained(tmp_path, save_original_format=layout == "per_expert")
    saved = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in saved) == (layout != "per_expert")
    if layout == "fused_transposed":
        saved = {n: np.ascontiguousarray(v.swapaxes(1, 2)) if ".experts." in n else v for n, v in saved.items()}
        save_file(saved, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written and "rope_theta" not in written, "the installed transformers writes the new spelling"
    if spelling == "published":
        rewrite_config(tmp_path, to_published_spelling)
    _, config, params = load_hf_directory(tmp_path)
    check(f"{layout}, {spelling}, {'tied' if tie else 'untied'}", oracle_logits(model), unquantized_logits(config, params, TOKENS))


def test_logits_of_a_sharded_bf16_checkpoint(tmp_path: Path, unquantized_logits: OurLogits) -> None:
    model = oracle()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    _, config, params = load_hf_directory(tmp_path)
    check("sharded, stored in bf16", oracle_logits(model), unquantized_logits(config, params, TOKENS))


@pytest.mark.parametrize("case", ["untied", "tied", "attention_bias", "head_dim_explicit"])
def test_transformers_loads_what_we_write(tmp_path: Path, case: str) -> None:
    model = oracle(**CASES[case])
    model.save_pretrained(tmp_path / "theirs")
    family, config, params = load_hf_directory(tmp_path / "theirs")
    save_hf_directory(tmp_path / "ours", family, config, params, dtype="float32", max_shard_bytes=20_000)
    loaded, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager", experts_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, parameter in model.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[name].numpy(), parameter.numpy(), err_msg=name)
    np.testing.assert_array_equal(oracle_logits(loaded), oracle_logits(model))


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_names_and_shapes_are_those_transformers_saves(tmp_path: Path, tie: bool) -> None:
    oracle(tie_word_embeddings=tie, attention_bias=True).save_pretrained(tmp_path)
    config = load_hf_directory(tmp_path).config
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    assert saved == file_shapes(key_map(config))


@pytest.mark.parametrize("case", ["untied", "tied_bias_head_dim_no_norm_topk"])
def test_gradients_of_the_mean_cross_entropy(tmp_path: Path, unquantized_logits: OurLogits, case: str) -> None:
    model = oracle(**CASES[case])
    model.save_pretrained(tmp_path)
    _, config, params = load_hf_directory(tmp_path)
    tokens = torch.from_numpy(TOKENS)
    logits = model(tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    for layer in range(config.num_layers):
        prefix, hidden = f"model.layers.{layer}.mlp.experts", config.expert_hidden_size
        gate_up, down = expected.pop(f"{prefix}.gate_up_proj"), expected.pop(f"{prefix}.down_proj")
        for e in range(config.num_experts):
            parts = {"gate": gate_up[e, :hidden], "up": gate_up[e, hidden:], "down": down[e]}
            expected |= {f"{prefix}.{e}.{name}_proj.weight": value for name, value in parts.items()}

    def loss(params: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(unquantized_logits(config, params, TOKENS)[:, :-1])
        targets = jnp.asarray(TOKENS[:, 1:], jnp.int32)
        return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))

    gradients = jax.grad(loss)(jax.tree.map(jnp.asarray, params))
    worst = 0.0
    for entry in key_map(config):
        leaf = gradients
        for key in entry.path:
            leaf = leaf[key]
        ours, theirs = np.asarray(leaf[entry.position]), expected.pop(entry.name)
        worst = max(worst, float(np.max(np.abs(ours - theirs)) / max(np.max(np.abs(theirs)), 1e-6)))
    assert not expected, "every gradient was compared"
    print(f"\n| gradients, {case} | {worst:.2e} | relative to the largest entry of the tensor |", end="")
    assert worst <= TOLERANCE


CONTROLS: dict[str, Callable[[Any], Any]] = {
    "rope_theta": lambda config: dataclasses.replace(config, rope_theta=config.rope_theta * 10),
    "norm_topk_prob": lambda config: dataclasses.replace(config, norm_topk_prob=not config.norm_topk_prob),
    "rms_norm_eps": lambda config: dataclasses.replace(config, rms_norm_eps=1e-2),
    "experts_per_token": lambda config: dataclasses.replace(config, experts_per_token=1),
}


@pytest.mark.parametrize("field", CONTROLS)
def test_control_a_wrong_config_value_shows(tmp_path: Path, unquantized_logits: OurLogits, field: str) -> None:
    model = oracle()
    model.save_pretrained(tmp_path)
    _, config, params = load_hf_directory(tmp_path)
    difference = float(np.max(np.abs(oracle_logits(model) - np.asarray(unquantized_logits(CONTROLS[field](config), params, TOKENS)))))
    print(f"\n| control: wrong {field} | {difference:.2e} | must exceed {100 * TOLERANCE:.0e} |", end="")
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("a, b", [("gate", "up"), ("k_proj", "v_proj"), ("q_norm", "k_norm"), ("input_norm", "post_attention_norm")])
def test_control_swapped_tensors_show(tmp_path: Path, unquantized_logits: OurLogits, a: str, b: str) -> None:
    model = oracle()
    model.save_pretrained(tmp_path)
    _, config, params = load_hf_directory(tmp_path)
    group = params["groups"][0]
    holder = next(node for node in (group, group["attention"], group["experts"]) if a in node)
    holder[a], holder[b] = holder[b], holder[a]
    difference = float(np.max(np.abs(oracle_logits(model) - np.asarray(unquantized_logits(config, params, TOKENS)))))
    print(f"\n| control: {a} and {b} swapped | {difference:.2e} | must exceed {100 * TOLERANCE:.0e} |", end="")
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("case", json.loads(RECORDED.read_text()))
def test_the_recorded_logits_are_those_of_transformers(make_checkpoint: Callable[..., Any], case: str) -> None:
    record = json.loads(RECORDED.read_text())[case]
    checkpoint = make_checkpoint(**record["changes"])
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        checkpoint.path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor(record["tokens"])).logits.numpy()
    np.testing.assert_allclose(logits, np.asarray(record["logits"], np.float32), rtol=0, atol=TOLERANCE)
