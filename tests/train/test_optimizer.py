"""Optimizer chain: warm-up, decay mask, clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trace_jax.config.schema import OptimizerConfig
from trace_jax.models.registry import config_from_dict, init_params
from trace_jax.train.optimizer import learning_rate_schedule, make_optimizer
from trace_jax.train.state import apply_gradients, initial_state


@pytest.fixture(scope="module")
def params(values):
    config = config_from_dict("qwen3_moe", {"vocab_size": 131, "attention_bias": True} | values["model"]["config"])
    return jax.tree.map(lambda leaf: leaf + 1, init_params("qwen3_moe", config, jax.random.key(0)))


@pytest.mark.parametrize(
    ("warmup", "expected"), [(0, [8, 8, 8, 8, 8, 8]), (1, [8, 8, 8, 8, 8, 8]), (2, [4, 8, 8, 8, 8, 8]), (4, [2, 4, 6, 8, 8, 8])]
)
def test_warmup_reaches_the_rate_at_its_last_update(warmup, expected):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=8e-3, warmup_steps=warmup))
    np.testing.assert_allclose([np.asarray(schedule(step)) for step in range(6)], np.asarray(expected) * 1e-3, rtol=1e-6)


@pytest.mark.parametrize(("warmup", "expected"), [(0, [8, 6, 4, 2, 0, 0]), (2, [4, 8, 8, 4, 0, 0])])
def test_the_rate_falls_to_zero(warmup, expected):
    schedule = learning_rate_schedule(OptimizerConfig(learning_rate=8e-3, warmup_steps=warmup, decay_steps=4))
    np.testing.assert_allclose([np.asarray(schedule(step)) for step in range(6)], np.asarray(expected) * 1e-3, atol=1e-9)


def test_updates_follow_the_warmup():
    """Adam's first steps on a constant gradient have the size of the learning rate."""
    config = OptimizerConfig(name="adam", learning_rate=8e-3, warmup_steps=4, grad_clip=0.0)
    optimizer = make_optimizer(config)
    params, gradient = {"w": jnp.zeros((2, 2))}, {"w": jnp.ones((2, 2))}
    state = optimizer.init(params)
    steps = []
    for _ in range(5):
        new, state, _ = apply_gradients(params, state, gradient, optimizer=optimizer)
        steps.append(float((params["w"] - new["w"])[0, 0]))
        params = new
    np.testing.assert_allclose(steps, [2e-3, 4e-3, 6e-3, 8e-3, 8e-3], rtol=1e-4)


def test_decay_acts_on_matrices_only(params):
    optimizer = make_optimizer(OptimizerConfig(name="adamw", learning_rate=0.1, weight_decay=0.5))
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _, norm = apply_gradients(params, optimizer.init(params), zeros, optimizer=optimizer)
    assert float(norm) == 0
    decayed, kept = [], []
    for (path, old), leaf in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(new), strict=True):
        name = jax.tree_util.keystr(path)
        if np.array_equal(old, leaf):
            kept.append(name)
        else:
            np.testing.assert_allclose(leaf, np.asarray(old) * 0.95, rtol=1e-5, atol=1e-6)
            decayed.append(name)
    assert all("norm" in name or "bias" in name for name in kept), kept
    assert not any("norm" in name or "bias" in name for name in decayed), decayed
    assert any("bias" in name for name in kept) and len(decayed) >= 9


@pytest.mark.parametrize("placed", [False, True])
def test_the_first_and_the_second_update_are_one_program(placed):
    """Arrays just made are not committed to a device, those that Orbax restored or a program returned are; jit tells them apart."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-3 if placed else 2e-3))  # one of its own, as programs are kept by optimizer
    made = {"w": jnp.ones((2, 2))}
    state = initial_state(jax.device_put(made, jax.devices()[0]) if placed else made, optimizer, {"k": jnp.ones(2)})
    assert all(leaf.committed for leaf in jax.tree.leaves(state))
    before = apply_gradients._cache_size()  # pyright: ignore[reportAttributeAccessIssue]
    params, opt_state = state.params, state.opt_state
    for _ in range(2):
        params, opt_state, _ = apply_gradients(params, opt_state, made, optimizer=optimizer)
    assert apply_gradients._cache_size() == before + 1  # pyright: ignore[reportAttributeAccessIssue]


def test_runs_with_one_config_share_their_programs():
    """The optimizer is part of the key under which jit keeps a program."""
    assert make_optimizer(OptimizerConfig()) is make_optimizer(OptimizerConfig())
    assert make_optimizer(OptimizerConfig(grad_clip=0.5)) is not make_optimizer(OptimizerConfig())


def test_clipping_by_global_norm():
    optimizer = make_optimizer(OptimizerConfig(name="adam", learning_rate=1.0, grad_clip=1.0, eps=1e3, b1=0.0, b2=0.0))
    params, gradient = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, {"a": jnp.full(1, 30.0), "b": jnp.full(1, 40.0)}
    new, _, norm = apply_gradients(params, optimizer.init(params), gradient, optimizer=optimizer)
    assert float(norm) == pytest.approx(50)
    # With a large eps and no memory Adam's step is the clipped gradient over (|g| + eps).
    np.testing.assert_allclose([float(new["a"][0]), float(new["b"][0])], [-0.6 / 1000.6, -0.8 / 1000.8], rtol=1e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_leaves_every_bit(bad):
    optimizer = make_optimizer(OptimizerConfig(name="adamw", learning_rate=0.1, weight_decay=0.5, warmup_steps=3))
    params = {"w": jnp.arange(6.0).reshape(2, 3), "v": jnp.ones(3)}
    state = optimizer.init(params)
    params, state, _ = apply_gradients(params, state, jax.tree.map(jnp.ones_like, params), optimizer=optimizer)
    gradient = {"w": jnp.ones((2, 3)).at[1, 2].set(bad), "v": jnp.ones(3)}
    new, new_state, norm = apply_gradients(params, state, gradient, optimizer=optimizer)
    assert not np.isfinite(norm)
    jax.tree.map(np.testing.assert_array_equal, (new, new_state), (params, state))
    assert int(optax.tree_utils.tree_get(new_state, "count", filtering=lambda path, _: "ScaleByAdam" in str(path[-1]))) == 1
