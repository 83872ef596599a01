"""One update on several meshes of one process, each compared with that on one device; prints the differences as JSON.

A program of its own, because the number of devices is fixed when jax starts: `python on_meshes.py GROUP`, with eight CPU devices.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny_policy as tiny  # noqa: E402

from pallas_kernels import grouped_matmul  # noqa: E402
from trace_jax.layers import expert_parallel  # noqa: E402
from trace_jax.layers.experts import ExpertWeights  # noqa: E402
from trace_jax.models.policy import Policy  # noqa: E402
from trace_jax.models.registry import Params, init_params  # noqa: E402
from trace_jax.quantization.calibration import calibrate  # noqa: E402
from trace_jax.quantization.multipliers import Multipliers  # noqa: E402
from trace_jax.quantization.plan import RECORDED_SITES, QuantPlan  # noqa: E402
from trace_jax.rollout import Trajectories  # noqa: E402
from trace_jax.rollout.embedded.decode import CaptureSpec  # noqa: E402
from trace_jax.rollout.embedded.engine import EmbeddedEngine  # noqa: E402
from trace_jax.rollout.weight_sync import layer_updates  # noqa: E402
from trace_jax.sharding.mesh import device_mesh  # noqa: E402
from trace_jax.sharding.placement import put_params  # noqa: E402
from trace_jax.sharding.rules import shardings  # noqa: E402
from trace_jax.train.objective import ObjectiveSpec  # noqa: E402
from trace_jax.train.state import initial_state  # noqa: E402
from trace_jax.train.update import UpdateSettings, measure, update_policy  # noqa: E402

CONFIG = replace(
    tiny.CONFIG, hidden_size=32, head_dim=16, num_layers=2, num_experts=8, num_kv_heads=2, expert_hidden_size=64, vocab_size=98
)
OPTIMIZER = optax.adamw(1e-3)

jax.config.update("jax_numpy_dtype_promotion", "strict")  # as in tests/conftest.py
jax.config.update("jax_numpy_rank_promotion", "raise")

GROUPS: dict[str, dict[str, Any]] = {
    "dense": {"meshes": [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "expert": 4}]},
    "ragged": {"implementation": "ragged", "meshes": [{"expert": 8}, {"data": 4, "expert": 2}, {"fsdp": 2, "expert": 2, "tensor": 2}]},
    "more": {"meshes": [{"fsdp": 8}, {"expert": 8}, {"data": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "expert": 2}]},
    "more_ragged": {"implementation": "ragged", "meshes": [{"data": 8}, {"data": 2, "expert": 4}, {"fsdp": 4, "tensor": 2}]},
    "per_token": {"plan": "per_token", "meshes": [{"fsdp": 2, "expert": 2, "tensor": 2}]},
    "mxfp4": {"plan": "mxfp4", "meshes": [{"fsdp": 2, "expert": 2, "tensor": 2}]},
    "fp8": {"plan": "fp8", "meshes": [{"fsdp": 4, "expert": 2}]},
    "bf16_compute": {"compute_dtype": "bfloat16", "meshes": [{"data": 2, "fsdp": 4}, {"expert": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}]},
}


def policy_of(compute_dtype: str = "float32", implementation: str = "dense") -> tuple[Policy, Params, Multipliers]:
    """The policy, masters whose output distribution is far from uniform, and calibrated multipliers."""
    policy = Policy("qwen3_moe", CONFIG, compute_dtype, implementation)
    params = init_params("qwen3_moe", CONFIG, jax.random.key(0))
    params["embed"]["weight"] = params["embed"]["weight"] * 20.0
    params["lm_head"]["weight"] = params["lm_head"]["weight"] * 6.0
    sequences = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, 16)).tolist()
    return policy, params, calibrate(policy, params, sequences, 1.5)


def rollout(policy: Policy, plan: QuantPlan, params: Params, multipliers: Multipliers) -> Trajectories:
    """Answers of the embedded engine with a record at every site and layer."""
    engine = EmbeddedEngine(policy, plan, CaptureSpec("mantissa", RECORDED_SITES, (0, 1)), 8)
    engine.update_weights(layer_updates(policy, plan, params, multipliers), 0)
    engine.submit(tiny.requests())
    return engine.poll()


def run_group(
    meshes: list[dict[str, int]], plan: str = "nvfp4", compute_dtype: str = "float32", implementation: str = "dense"
) -> dict[str, dict[str, Any]]:
    """What differs from one device, by mesh; and, as a control, what differs where the experts of two devices are exchanged."""
    policy, params, multipliers = policy_of(compute_dtype, implementation)
    formats = tiny.PLANS[plan]
    trajectories = rollout(policy, formats, params, multipliers)
    settings = UpdateSettings(ObjectiveSpec(policy, tiny.guided(formats)), 8 * 32, 28)
    advantages = np.random.default_rng(1).normal(size=trajectories.num_sequences).astype(np.float32)

    def update(params: Params) -> dict[str, Any]:
        state = initial_state(params, OPTIMIZER, multipliers)
        measured = measure(state.params, state.multipliers, trajectories, settings, advantages=advantages, measure_unguided=True)
        after = update_policy(state, measured, OPTIMIZER).state
        sent = {name: np.asarray(x) for part in layer_updates(policy, formats, params, multipliers) for name, x in part.tensors.items()}
        return {"before": state, "after": after, "measured": measured, "sent": sent}

    alone = update(params)
    found = {}
    for sizes in meshes:
        mesh = device_mesh(sizes)
        assert mesh is not None
        result = update(put_params(mesh, params))
        found["x".join(f"{axis}{size}" for axis, size in sizes.items())] = _compare(result, alone)
        for state in (result["before"], result["after"]):  # a step leaves everything where it lay, so that nothing is compiled twice
            for part in (state.params, state.opt_state):
                jax.tree.map(_assert_placed, part, shardings(part, mesh))
    swapped = dict(params) | {"groups": {0: params["groups"][0] | {"experts": _exchanged(params["groups"][0]["experts"])}}}
    found["control"] = _compare(update(put_params(mesh, swapped)), alone)
    return found


def _exchanged(experts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The experts of one half of the devices on the other half."""
    return {name: jnp.roll(w, w.shape[1] // 2, axis=1) for name, w in experts.items()}


def _assert_placed(leaf: jax.Array, sharding: jax.sharding.NamedSharding) -> None:
    assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, leaf.sharding, sharding)


def _compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    first, second = one["measured"], other["measured"]
    gradients = [jax.device_get(jax.tree.leaves(m.gradient)) for m in (first, second)]
    largest = max(float(np.max(np.abs(g))) for g in gradients[1])
    moments = [jax.device_get(jax.tree.leaves(run["after"].opt_state)) for run in (one, other)]
    counted = ("guidance/parity_agreement", "router/agreement", "unguided/rollout_corr/kl")
    return {
        "logp": float(np.max(np.abs(first.logp - second.logp))),
        "gradient": max(float(np.max(np.abs(a - b))) for a, b in zip(*gradients, strict=True)) / largest,
        "loss": abs(float(np.sum(first.stats["loss"].sum)) - float(np.sum(second.stats["loss"].sum))),
        "moments": max(float(np.max(np.abs(a - b))) for a, b in zip(*moments, strict=True)) / largest,
        "parity": abs(first.stats[counted[0]].sum - second.stats[counted[0]].sum) if counted[0] in first.stats else 0.0,
        "counts": all(int(np.sum(first.stats[n].count)) == int(np.sum(second.stats[n].count)) for n in counted if n in first.stats),
        "bytes": one["sent"].keys() == other["sent"].keys() and all(np.array_equal(a, other["sent"][n]) for n, a in one["sent"].items()),
    }


def compare_transports() -> dict[str, float]:
    """Value and gradients of an exchange whose rows travel by `ragged_all_to_all`, which CPUs lack and which is therefore written out
    here, against the one that sends padded slots; and, as a control, with the offsets of the receivers taken as those of the senders.
    """
    mesh = device_mesh({"data": 2, "expert": 4})
    assert mesh is not None
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (48, 6))
    ids = jax.random.categorical(keys[1], jnp.arange(8.0) * 0.4, shape=(48, 2)).astype(jnp.int32)  # devices with many rows and with few
    mixing = jax.random.uniform(keys[2], (48, 2))
    weights = ExpertWeights(*(jax.random.normal(keys[3], shape) for shape in ((8, 4, 6), (8, 4, 6), (8, 6, 4))))

    def products(rows: jax.Array, sizes: jax.Array, weights: ExpertWeights) -> jax.Array:
        return grouped_matmul(grouped_matmul(rows, weights.gate, sizes), weights.down, sizes)

    def run(ragged: bool) -> list[np.ndarray]:
        def loss(x: jax.Array, mixing: jax.Array, weights: ExpertWeights) -> tuple[jax.Array, jax.Array]:
            y = expert_parallel.exchange_rows(products, x, ids, mixing, weights, ragged)
            return jnp.sum(jnp.sin(y)), y

        with jax.set_mesh(mesh):
            return jax.device_get(jax.tree.leaves(jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(x, mixing, weights)))

    def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        gathered = (jax.lax.all_gather(part, axis_name) for part in (operand, input_offsets, send_sizes, output_offsets))
        (operands, starts, sent, places), me = gathered, jax.lax.axis_index(axis_name)
        index = jnp.arange(output.shape[0])
        for source in range(operands.shape[0]):
            row = (index - places[source, me]).astype(jnp.int32)
            # A size that the two sides do not agree on hangs a real device; here it loses the rows.
            found = (row >= 0) & (row < sent[source, me]) & (sent[source, me] == recv_sizes[source])
            values = operands[source][jnp.clip(row + starts[source, me], 0, operand.shape[0] - 1)]
            output = jnp.where(found.reshape(-1, *[1] * (output.ndim - 1)), values, output)
        return output

    slots = run(False)
    jax.lax.ragged_all_to_all = ragged_all_to_all
    rows = run(True)
    jax.lax.ragged_all_to_all = lambda a, b, starts, sizes, places, received, *, axis_name: ragged_all_to_all(
        a, b, places, sizes, starts, received, axis_name=axis_name
    )
    wrong = run(True)
    return {
        "difference": max(float(np.max(np.abs(a - b))) for a, b in zip(slots, rows, strict=True)),
        "control": max(float(np.max(np.abs(a - b))) for a, b in zip(slots, wrong, strict=True)),
    }


def lowers_for_gpus() -> bool:
    """Whether the exchange, with its gradient, lowers for CUDA with the collective of that name."""
    mesh = device_mesh({"expert": 8})
    assert mesh is not None
    weights = ExpertWeights(jnp.ones((8, 4, 6)), jnp.ones((8, 4, 6)), jnp.ones((8, 6, 4)))

    def loss(x: jax.Array, weights: ExpertWeights) -> jax.Array:
        ids = jnp.zeros((16, 2), jnp.int32)

        def products(rows: jax.Array, sizes: jax.Array, weights: ExpertWeights) -> jax.Array:
            return rows * jnp.sum(weights.gate)

        return jnp.sum(expert_parallel.exchange_rows(products, x, ids, jnp.ones((16, 2)), weights, True))

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss)).trace(jnp.ones((16, 6)), weights).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@ragged_all_to_all") >= 3


if __name__ == "__main__":
    results: dict[str, Any] = {name: run_group(**GROUPS[name]) for name in sys.argv[1:] if name in GROUPS}
    if "transports" in sys.argv:
        results["transports"] = {"lowers": lowers_for_gpus(), **compare_transports()}
    print(json.dumps(results, default=float))
