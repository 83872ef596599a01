"""One of two processes with a device each, and a mesh over both: `python two_processes.py`, with the variables of `launch_of`.

Prints as JSON what each process found: whether errors and disagreement reach all, whose answers it got, and how an update on the mesh
differs from one on its own device.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from trace_jax.errors import UserError
from trace_jax.sharding.processes import fail_together, gathered, is_first, join, on_first, own_part, require_agreement

join()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from on_meshes import CONFIG, OPTIMIZER, policy_of, tiny  # noqa: E402

from trace_jax.quantization.plan import RECORDED_SITES  # noqa: E402
from trace_jax.rollout import Engine, generate  # noqa: E402
from trace_jax.rollout.embedded.decode import CaptureSpec  # noqa: E402
from trace_jax.rollout.embedded.engine import EmbeddedEngine  # noqa: E402
from trace_jax.rollout.engine import Request  # noqa: E402
from trace_jax.rollout.shared_engine import SharedEngine  # noqa: E402
from trace_jax.rollout.weight_sync import layer_updates  # noqa: E402
from trace_jax.sharding.mesh import device_mesh  # noqa: E402
from trace_jax.sharding.placement import put_params, to_host  # noqa: E402
from trace_jax.train.objective import ObjectiveSpec  # noqa: E402
from trace_jax.train.state import initial_state  # noqa: E402
from trace_jax.train.update import UpdateSettings, measure, update_policy  # noqa: E402


def message(action: Callable[[], Any]) -> str:
    """What an action is refused with."""
    try:
        action()
    except UserError as error:
        return str(error)
    return ""


def main() -> dict[str, Any]:
    """Everything of the module's docstring."""
    me = jax.process_index()
    found: dict[str, Any] = {
        "gathered": gathered({"index": me, "text": "x" * (1 + 50 * me)}) == [{"index": i, "text": "x" * (1 + 50 * i)} for i in (0, 1)],
        "parts": [(part.start, part.stop) for part in gathered(own_part(5))],
        "first": gathered(is_first()),
        "error": message(lambda: fail_together(UserError("no room") if me else None)),
        "error of the first": message(lambda: on_first(lambda: device_mesh({"data": 7}))),
        "disagreement": message(lambda: require_agreement("seed", 3 + me)),
    }
    policy, params, multipliers = policy_of(implementation="ragged")
    plan = tiny.PLANS["nvfp4"]
    mesh = device_mesh({"expert": 2})
    assert mesh is not None
    divided = put_params(mesh, params)

    def new_engine() -> EmbeddedEngine:
        return EmbeddedEngine(policy, plan, CaptureSpec("mantissa", RECORDED_SITES, (0, 1)), 8)

    generated: list[int] = []

    class Watched(EmbeddedEngine):
        def submit(self, requests: Any) -> None:
            generated.extend(request.sample_id for request in requests)
            super().submit(requests)

    shared: Engine = SharedEngine(Watched(policy, plan, CaptureSpec("mantissa", RECORDED_SITES, (0, 1)), 8))
    local = new_engine()
    acks = [
        shared.update_weights(layer_updates(policy, plan, divided, multipliers), 0),
        local.update_weights(layer_updates(policy, plan, params, multipliers), 0),
    ]
    requests: list[Request] = tiny.requests()
    answers, alone = generate(shared, requests), generate(local, requests)
    found |= {
        "bytes": acks[0] == acks[1],
        "generated": gathered(generated),
        "tokens": bool(np.array_equal(answers.tokens, alone.tokens)),
        "logprobs": float(np.max(np.abs(answers.logprobs - alone.logprobs))),
    }
    settings = UpdateSettings(ObjectiveSpec(policy, tiny.guided(plan)), 8 * 32, 28)
    advantages = np.random.default_rng(1).normal(size=alone.num_sequences).astype(np.float32)
    results = []
    for masters in (divided, params):
        state = initial_state(masters, OPTIMIZER, multipliers)
        measured = measure(state.params, state.multipliers, alone, settings, advantages=advantages)
        results.append(to_host((measured.gradient, measured.logp, update_policy(state, measured, OPTIMIZER).state.params)))
    differences = [
        max(float(np.max(np.abs(a - b))) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
        for one, other in zip(*results, strict=True)
    ]
    largest = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(results[1][0]))
    shards = divided["groups"][0]["experts"]["gate"].addressable_shards
    found |= {"gradient": differences[0] / largest, "logp": differences[1], "params": differences[2]}
    found["own experts"] = len(shards) == 1 and shards[0].data.shape[1] == CONFIG.num_experts // 2
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
