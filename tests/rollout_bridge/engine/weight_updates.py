"""Updates of the tiny policy, good and bad ones, and a ring for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from rollout_bridge.engine.weights import send
from rollout_bridge.wire import RingWriter
from tests import tiny_policy
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.quantization.plan import QuantPlan
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.rollout.weight_update import Ack, LayerUpdate


@functools.cache
def update(
    plan: QuantPlan = tiny_policy.PLANS["nvfp4"],
    dtype: str = "bfloat16",
    seed: int = 0,
    gain: float = 1.0,
    config: Qwen3MoeConfig = tiny_policy.CONFIG,
) -> tuple[LayerUpdate, ...]:
    """The update of the tiny policy with its experts multiplied by `gain`, as NumPy arrays."""
    policy = tiny_policy.policy(dtype, config)
    made = layer_updates(policy, plan, masters(seed, gain, config), tiny_policy.multipliers(seed, config))
    return tuple(LayerUpdate(one.layer_id, jax.device_get(dict(one.tensors))) for one in made)


def masters(seed: int, gain: float = 1.0, config: Qwen3MoeConfig = tiny_policy.CONFIG) -> dict[str, Any]:
    """Parameters with multiplied experts."""
    params = tiny_policy.params(seed, config)
    groups = {
        number: group | {"experts": {name: gain * w for name, w in group["experts"].items()}} for number, group in params["groups"].items()
    }
    return params | {"groups": groups}


def changed(updates: tuple[LayerUpdate, ...], name: str, change: Callable[[np.ndarray], Any]) -> list[LayerUpdate]:
    """The update with one tensor replaced; `change` returns None to leave it out, or tensors by name to put in its place."""
    found = []
    for one in updates:
        tensors = dict(one.tensors)
        if name in tensors:
            result = change(np.array(tensors.pop(name)))
            if isinstance(result, dict):
                tensors |= result
            elif result is not None:
                tensors[name] = result
        found.append(LayerUpdate(one.layer_id, tensors))
    assert any(name in one.tensors for one in updates)
    return found


@contextmanager
def sending(writer: RingWriter, *updates: Iterable[LayerUpdate], first_version: int = 1, timeout_s: float = 60.0) -> Iterator[list[Ack]]:
    """Sends updates one after the other from a thread while the block reads; yields a list that gets what each one expects to hear."""
    expected: list[Ack] = []

    def work() -> None:
        for version, layers in enumerate(updates, first_version):
            expected.append(send(layers, writer, version, timeout_s))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield expected
    thread.join(60.0)
    assert not thread.is_alive()
