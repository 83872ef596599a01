"""`train --dry-run` refuses what the start of `train` refuses, with the same words, and counts the memory of a run."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding

from trace_jax.errors import UserError
from trace_jax.layers.kv_cache import init_cache
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.models.registry import init_params, param_shapes
from trace_jax.quantization.plan import SITES
from trace_jax.sharding.axes import AXES
from trace_jax.sharding.rules import specs
from trace_jax.train.dry_run import device_plan, memory_plan, plan_run
from trace_jax.train.run import run_training
from trace_jax.train.setup import build_setup, weight_updates


@pytest.mark.parametrize(
    ("answers", "override", "named"),
    [
        ({"train": "a", "test": "a"}, "steps=1", "split 'validation' of task .* is empty"),
        ({"validation": "a", "test": "a"}, "steps=1", "split 'train' of task .* is empty"),
        ({"train": "a", "validation": "a"}, "eval.split=test", "split 'test' of task .* is empty"),
        ({"train": "a", "validation": "a"}, "rollout.max_new_tokens=30", "exceeds the context of 32"),
        ({"train": "\u00e9", "validation": "a"}, "steps=1", "tokenizer ascii cannot encode"),
    ],
)
def test_what_train_refuses(make_config, tmp_path, answers, override, named):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"q{split}", "answer": answer, "split": split}) + "\n" for split, answer in answers.items())
    )
    config = make_config(f"task={{name: 'jsonl:{rows}', reward: exact}}", override)
    with pytest.raises(UserError, match=named) as dry:
        plan_run(config)
    with pytest.raises(UserError) as real:
        run_training(config, tmp_path / "run")
    assert str(dry.value) == str(real.value)


@pytest.mark.slow
def test_a_run_that_never_evaluates_needs_no_rows_for_it(make_config, tmp_path):
    """ "0 is never": neither the dry run nor the run looks at the split, and there is no row of step 0."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"q{number}", "answer": "a", "split": "train"}) + "\n" for number in range(4)))
    config = make_config(f"task={{name: 'jsonl:{rows}', reward: exact}}", "eval.every=0", "steps=1")
    plan_run(config)
    run_training(config, tmp_path / "run")
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("formats", ["{k: nvfp4, v: mxfp4}", "{k: fp8, v: bf16}"])
def test_the_memory_plan_counts_what_is_allocated(make_config, dtype, formats):
    setup = build_setup(make_config(f"model.compute_dtype={dtype}", "method=qat", f"rollout.kv_cache={formats}"))
    model, plan, length = setup.policy.config, memory_plan(setup), setup.max_sequence_tokens()
    params = init_params(setup.policy.family, model, jax.random.key(0))
    compute = jnp.dtype(setup.policy.compute_dtype)
    assert plan["masters and Adam moments (float32), bytes"] == 3 * bytes_of(params)
    assert plan["engine weights (compute dtype), bytes"] == bytes_of(jax.tree.map(lambda leaf: leaf.astype(compute), params))
    cache = init_cache(model.num_layers, 8, length, model.num_kv_heads, model.head_dim, setup.rollout_plan, compute)
    assert plan["KV cache of a full batch, bytes"] == bytes_of(cache)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 4, 1, 1), (1, 2, 2, 1), (2, 1, 2, 2), (1, 2, 1, 2)])
def test_the_plan_of_a_device_is_its_share_of_the_arrays(make_config, sizes):
    """Against the shapes that JAX itself gives the shards."""
    setup = build_setup(make_config("model.config.num_kv_heads=2", "sync.every=2", "sync.max_staleness=1"))
    mesh = AbstractMesh(sizes, AXES)
    shapes = param_shapes(setup.policy.family, setup.policy.config)
    divided = specs(shapes, dict(mesh.shape))
    shards = jax.tree.map(lambda leaf, spec: math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape)), shapes, divided)
    plan, held = device_plan(setup, mesh.shape), sum(jax.tree.leaves(shards))
    assert plan["devices of the mesh"] == math.prod(sizes)
    assert plan["each device: masters and Adam moments (float32), bytes"] == 12 * held
    experts = sum(jax.tree.leaves([group["experts"] for group in shards["groups"].values()]))
    assert plan["each device: experts as the trainer rounds them (compute dtype), bytes"] == 4 * experts
    assert plan["each device: all of these, bytes"] == (12 + 8 + 12 + 4) * held + 4 * experts
    whole = memory_plan(setup)["masters and Adam moments (float32), bytes"]
    assert 12 * held < whole or math.prod(sizes[1:]) == 1  # `data` alone divides no parameter
    assert device_plan(setup, {}) == {}


def test_engines_that_the_start_refuses(make_config, monkeypatch):
    """Two processes, and a GPU, are claimed here; what they change is what the config may ask for."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    asynchronous = make_config("sync.max_staleness=1")
    with pytest.raises(UserError, match="^sync.max_staleness is 1, .* write sync.max_staleness: 0, or use one process$") as dry:
        plan_run(asynchronous)
    with pytest.raises(UserError) as real:
        build_setup(asynchronous).engine()
    assert str(dry.value) == str(real.value)
    plan_run(make_config())
    monkeypatch.undo()
    pytest.importorskip("ray", reason="needs trace-jax[ray]")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(UserError, match="^rollout.ray.address is null, and Ray would start the engines on this machine's GPUs"):
        plan_run(make_config("rollout.launcher=ray"))
    build_setup(make_config("rollout.launcher=ray", "rollout.ray.address=auto")).require_launch()
    monkeypatch.undo()
    build_setup(make_config("rollout.launcher=ray")).require_launch()


def test_the_memory_plan_follows_the_settings(make_config):
    def plan(*overrides):
        return memory_plan(build_setup(make_config(*overrides)))

    whole = plan()
    cache, audited, behind = (
        "KV cache of a full batch, bytes",
        "audited codes of a step, bytes",
        "masters that the engine serves (float32), bytes",
    )
    assert plan("rollout.max_batch=2")[cache] == whole[cache] / 4 and plan("rollout.max_batch=99")[cache] == whole[cache]
    # NVFP4 codes and scales at both layers: width 32, and one KV head of 16 on either side.
    assert whole[audited] == 2 * whole["longest sequence, tokens"] * 2 * ((16 + 2) + 2 * (8 + 1))
    assert plan("guidance.audit.every=0")[audited] == 0 and plan("guidance.audit.sequences=99")[audited] == 4 * whole[audited]
    assert whole[behind] == 0
    assert plan("sync.every=2", "sync.max_staleness=1")[behind] == whole["masters and Adam moments (float32), bytes"] / 3


def test_the_memory_plan_of_an_asynchronous_run(make_config):
    """As many batches ahead as a stream begins before its trainer has done anything (tests/rollout/test_stream.py), less the one in use."""

    def plan(*overrides):
        return memory_plan(build_setup(make_config(*overrides)))

    waiting, ahead, record = (
        "new weights that wait for the engine, bytes",
        "guidance record of batches ahead, bytes",
        "guidance record of a step, bytes",
    )
    whole = plan()
    assert whole[waiting] == whole[ahead] == 0
    setup = build_setup(make_config("sync.max_staleness=2"))
    params = init_params(setup.policy.family, setup.policy.config, jax.random.key(0))
    multipliers = {site: jnp.ones(setup.policy.config.num_layers) for site in SITES}
    sent = [tensor for update in weight_updates(setup, params, multipliers) for tensor in update.tensors.values()]
    assert memory_plan(setup)[waiting] == bytes_of(sent)
    for settings, batches in ((["sync.max_staleness=2"], 2), (["sync.max_staleness=5", "train.updates_per_batch=2"], 2)):
        assert plan(*settings)[ahead] == batches * whole[record]
