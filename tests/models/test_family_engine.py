"""Every family through the embedded engine at FP4 with capture, and through a guided training step over what it generated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny
from model_families import FAMILIES, config_of

from trace_jax.config.training_sections import OptimizerConfig
from trace_jax.errors import UserError
from trace_jax.models.key_map import FLOAT32_LEAVES, flatten, parameter_shapes
from trace_jax.models.registry import ModelConfig, key_map, param_shapes
from trace_jax.quantization.plan import UNQUANTIZED, QuantPlan, rollout_plan
from trace_jax.rollout import Trajectories, generate
from trace_jax.rollout.weight_sync import decode_updates, expected_tensors, layer_updates
from trace_jax.train.batches import TrainBatch, make_batch
from trace_jax.train.objective import ObjectiveSpec
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.state import initial_state
from trace_jax.train.update import UpdateSettings, measure, update_policy

LENGTH = 32


def plan_of(config: ModelConfig) -> QuantPlan:
    """FP4 wherever the family rounds."""
    experts = "nvfp4" if config.moe_layer_ids else "bf16"
    cache = "nvfp4" if config.layers_of("k") else "bf16"
    return rollout_plan(experts, experts, cache, cache)


def generated(config: ModelConfig, kind: Any = "mantissa") -> Trajectories:
    return generate(tiny.engine(plan_of(config), "float32", kind, config=config), tiny.requests(6, max_new_tokens=9))


def batch_of(config: ModelConfig, answers: Trajectories) -> TrainBatch:
    bins = [[index] for index in range(answers.num_sequences)]
    return make_batch(answers, bins, LENGTH, len(bins), num_layers=config.num_layers)[0]


def gap(config: ModelConfig, batch: TrainBatch, plan: QuantPlan) -> np.ndarray:
    return tiny.gap(batch, tiny.score(batch, plan, "float32", config)[0])


QUICK = ("qwen3_5_moe", "gpt_oss", "deepseek_v3")
"""Between them they have every kind of layer, site and cache."""


@pytest.fixture(params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES], scope="module")
def family(request: pytest.FixtureRequest) -> tuple[ModelConfig, Trajectories]:
    config = config_of(request.param)
    return config, generated(config)


def test_the_key_map_covers_the_tree_of_the_model_exactly_once(family) -> None:
    config, _ = family
    entries = key_map(config.FAMILY, config)
    shapes = {path: leaf.shape for path, leaf in flatten(param_shapes(config.FAMILY, config)).items()}
    assert shapes == parameter_shapes(entries)
    times = {path: np.zeros(shape, np.int64) for path, shape in shapes.items()}
    for entry in entries:
        times[entry.path][entry.position] += 1
    assert all((count == 1).all() for count in times.values())


def test_record_and_routes_name_the_layers_that_have_them(family) -> None:
    config, answers = family
    if not config.moe_layer_ids:
        assert answers.routes is None
    else:
        assert answers.routes is not None and answers.routes.moe_layer_ids.tolist() == list(config.moe_layer_ids)
        answers.routes.validate(answers.num_tokens)
    recorded = {} if answers.guidance is None else {name: site.layer_ids.tolist() for name, site in answers.guidance.sites.items()}
    expected = {site: list(config.layers_of(site)) for site in ("expert_input", "k", "v") if config.layers_of(site)}
    assert recorded == expected
    if answers.guidance is not None:
        answers.guidance.validate(answers.num_tokens)


def test_sync_10_an_update_carries_every_parameter(family) -> None:
    config, _ = family
    policy, params = tiny.policy("bfloat16", config), tiny.params(0, config)
    updates = list(layer_updates(policy, UNQUANTIZED, params, {}))
    assert [update.layer_id for update in updates] == [*range(config.num_layers), None]
    names = [name for update in updates for name in update.tensors]
    assert len(names) == len(set(names)) == len(expected_tensors(policy, UNQUANTIZED))
    decoded, _ = decode_updates(policy, UNQUANTIZED, {name: leaf for update in updates for name, leaf in update.tensors.items()})
    found = flatten(decoded)
    for path, leaf in flatten(params).items():
        dtype = jnp.float32 if path[-1] in FLOAT32_LEAVES else jnp.bfloat16
        assert np.array_equal(np.asarray(found.pop(path)), np.asarray(leaf.astype(dtype))), path
    assert not found


def test_the_guided_trainer_repeats_the_rollout(family) -> None:
    config, answers = family
    batch, guided = batch_of(config, answers), tiny.guided(plan_of(config))
    found = gap(config, batch, guided)
    assert found.max() <= 1e-4
    if batch.guides is None:
        return
    shifted = tiny.with_guides(batch, lambda site: replace(site, data=tiny.shifted(site.data), scales=tiny.shifted(site.scales)))
    assert gap(config, shifted, guided).mean() > 10 * 1e-4
    if batch.routes is not None:
        others = replace(batch, routes=jnp.where(batch.routes >= 0, (batch.routes + 1) % config.num_experts, -1))
        assert gap(config, others, guided).mean() > 10 * 1e-4


def test_packed_rows_give_the_log_probs_of_rows_of_their_own(family) -> None:
    """Neither windows nor recurrent states reach over the border of two sequences."""
    config, answers = family
    alone, (packed, layout) = (
        batch_of(config, answers),
        make_batch(answers, [[0, 1], [2, 3], [4, 5]], 2 * LENGTH, 6, num_layers=config.num_layers),
    )
    found = []
    for batch in (alone, packed):
        logp, _ = tiny.score(batch, tiny.guided(plan_of(config)), "float32", config)
        found.append(logp[np.asarray(batch.sampled)])
    assert layout.lengths.size == answers.num_sequences and found[0].size > 20
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)


def test_a_training_step_moves_every_parameter_that_has_a_gradient(family) -> None:
    config, answers = family
    spec = ObjectiveSpec(tiny.policy("float32", config), tiny.guided(plan_of(config)))
    settings = UpdateSettings(spec, micro_batch_tokens=128, max_length=LENGTH, replay=bool(config.moe_layer_ids))
    params, optimizer = tiny.params(0, config), make_optimizer(OptimizerConfig(learning_rate=1e-3))
    advantages = np.linspace(-1, 1, answers.num_sequences).astype(np.float32)
    measured = measure(params, tiny.multipliers(0, config), answers, settings, advantages=advantages)
    before = flatten(jax.tree.map(np.asarray, params))
    state = initial_state(jax.tree.map(jnp.array, params), optimizer, tiny.multipliers(0, config))
    after = flatten(update_policy(state, measured, optimizer).state.params)
    assert float(measured.stats["train_rollout_logprob_abs_diff_max"].maximum) <= 1e-4  # pyright: ignore
    for path, old in before.items():
        new = np.asarray(after[path])
        assert np.isfinite(new).all(), path
        assert np.array_equal(new, old) == (path[-1] in FLOAT32_LEAVES), path


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_config_says_survives_its_mapping(name: str) -> None:
    config = config_of(name)
    assert type(config).from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match=f"model.config.rope_base is not a field of {name}"):
        type(config).from_dict(config.to_dict() | {"rope_base": 1.0})
