"""Dense checkpoints read as mixtures of experts compute what they computed before."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.errors import UserError
from trace_jax.layers.attention import causal_mask
from trace_jax.layers.logprobs import logits_of
from trace_jax.models.hf import load_hf_directory, save_hf_directory
from trace_jax.models.inputs import ForwardInputs, ForwardOptions
from trace_jax.models.llama.config import LlamaConfig
from trace_jax.models.policy import Policy
from trace_jax.models.qwen3.config import Qwen3Config
from trace_jax.models.registry import init_params
from trace_jax.models.upcycled_files import Upcycling
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.import_checkpoint import import_hf_checkpoint

SIZES: dict[str, Any] = {"vocab_size": 131, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
DENSE: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, ffn_hidden_size=48, rope_theta=100_000.0, tie_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, ffn_hidden_size=48, rope_theta=1_000_000.0),
}
MIXTURES = {"llama": "mixtral", "qwen3": "qwen3_moe"}


@pytest.fixture
def dense(tmp_path: Path) -> Callable[..., Path]:
    def make(family: str, **changes: Any) -> Path:
        config = replace(DENSE[family], **changes)
        save_hf_directory(tmp_path / family, family, config, init_params(family, config, jax.random.key(1)), dtype="float32")
        return tmp_path / family

    return make


def logits(policy: Policy, params: Any, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of some tokens, and the experts that they used."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 131, (3, 12)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(12, dtype=jnp.int32)[None], tokens.shape)
    inputs = ForwardInputs(tokens, positions, causal_mask(positions, jnp.ones_like(tokens)), {})
    options = ForwardOptions(compute_dtype=dtype, experts_implementation="ragged")

    @jax.jit
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        output = policy.forward(params, inputs, options)
        return logits_of(output.hidden, policy.head(params)), output.routes

    found, routes = run(params)
    return np.asarray(found), np.asarray(routes)


@pytest.mark.parametrize("how", [Upcycling(4), Upcycling(3, 1), Upcycling(6, 3, split=True)], ids=["copies", "one", "split"])
@pytest.mark.parametrize("family", DENSE)
def test_the_first_step_reproduces_the_dense_logits(dense: Callable[..., Path], tmp_path: Path, family: str, how: Upcycling) -> None:
    source = dense(family)
    expected, _ = logits(Policy(family, DENSE[family]), load_hf_directory(source).params, "float32")
    import_hf_checkpoint(source, tmp_path / "moe", how)
    loaded = load_policy(tmp_path / "moe")
    assert loaded.policy.family == MIXTURES[family]
    found, routes = logits(loaded.policy, loaded.params, "float32")
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=2e-6)
    assert np.unique(routes).size == how.num_experts, "the router must not leave experts out"

    if how.split:  # the control: one slice twice is not the dense layer
        experts = loaded.params["groups"][0]["experts"]
        other = jax.tree.map(lambda w: w[:, jnp.asarray([0, 0, 2, 3, 4, 5])], experts)
        wrong, _ = logits(loaded.policy, {**loaded.params, "groups": {0: {**loaded.params["groups"][0], "experts": other}}}, "float32")
        assert np.abs(wrong - expected).max() > 1e-3


def test_every_expert_of_a_copy_has_the_dense_weights(dense: Callable[..., Path], tmp_path: Path) -> None:
    source = dense("qwen3")
    mlp = load_hf_directory(source).params["groups"][0]["mlp"]
    import_hf_checkpoint(source, tmp_path / "moe", Upcycling(4))
    experts = load_policy(tmp_path / "moe").params["groups"][0]["experts"]
    for name in ("gate", "up", "down"):
        np.testing.assert_array_equal(np.asarray(experts[name]), np.repeat(mlp[name][:, None], 4, axis=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 3), "--upcycle 2 with 3 experts per token; write 1 to 2 per token"),
        ((5, 2, True), "5 experts are no multiple of 2 a token"),
    ],
)
def test_impossible_numbers(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Upcycling(*arguments)


def test_hidden_units_that_do_not_divide(dense: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--split cannot cut intermediate_size=48 into 5 equal slices"):
        import_hf_checkpoint(dense("llama"), tmp_path / "new" / "moe", Upcycling(5, 5, split=True))
    assert [path.name for path in tmp_path.iterdir()] == ["llama"], "what a refused import began must be gone"


def test_a_mixture_is_not_upcycled(make_checkpoint: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--upcycle takes a dense checkpoint of llama or qwen3, not of qwen3_moe; leave it out"):
        import_hf_checkpoint(make_checkpoint().path, tmp_path / "moe", Upcycling(4))


def test_biases_that_the_mixture_does_not_have(dense: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has unknown model\.layers\.0\.self_attn\.k_proj\.bias"):
        import_hf_checkpoint(dense("llama", attention_bias=True), tmp_path / "moe", Upcycling(4))


def test_config_of_the_mixture_is_what_transformers_writes(dense: Callable[..., Path], tmp_path: Path) -> None:
    source = dense("llama")
    content = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**content, "pretraining_tp": 1, "mlp_bias": False}))
    config = import_hf_checkpoint(source, tmp_path / "moe", Upcycling(4))["config"]
    assert (config["num_experts"], config["experts_per_token"], config["expert_hidden_size"]) == (4, 2, 48)
