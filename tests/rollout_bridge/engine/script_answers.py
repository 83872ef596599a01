"""Requests to a scripted worker, the answers that its script gives them, and weights that it takes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np

from rollout_bridge.engine.engine import VllmEngine
from rollout_bridge.engine.process import ProcessLink
from tests.rollout_bridge.engine.scripted import logprob, token
from trace_jax.rollout import Ack, LayerUpdate, Request, Trajectories, UpdateDigest


def requests(count: int = 12, first: int = 0, **changes: Any) -> list[Request]:
    """Prompts of 1 to 5 tokens, answers of 3 to 11."""
    fields: dict[str, Any] = {"stop_token_ids": (49,), **changes}
    return [
        Request(
            sample_id=sample,
            prompt_id=100 + sample,
            group=sample // 4,
            tokens=np.arange(sample % 5 + 1, dtype=np.int32),
            seed=sample,
            **{"max_new_tokens": 3 + sample % 9, **fields},
        )
        for sample in range(first, first + count)
    ]


def layers(names: tuple[str, ...] = ("a", "b"), size: int = 3000) -> Iterator[LayerUpdate]:
    """Layers with a tensor each."""
    for index, name in enumerate(names):
        data = np.random.default_rng(index).standard_normal(size).astype(np.float32)
        yield LayerUpdate(index, {f"model.layers.{index}.{name}.weight": data})


def expected_ack(version: int, **changes: Any) -> Ack:
    """What the trainer computes itself."""
    digest = UpdateDigest()
    for update in layers(**changes):
        digest.add(update)
    return digest.ack(version)


def sync(engine: VllmEngine, version: int = 0) -> None:
    """Weights of a version."""
    assert engine.update_weights(layers(), version) == expected_ack(version)


def check(trajectories: Trajectories, wanted: list[Request], version: int = 0) -> None:
    """Each request came once, with the answer of the script; the order is free."""
    trajectories.validate()
    assert sorted(trajectories.sample_id.tolist()) == sorted(request.sample_id for request in wanted)
    for request in wanted:
        (index,) = np.flatnonzero(trajectories.sample_id == request.sample_id)
        one = trajectories.sequence(int(index))
        answer = [token(request.seed, place) for place in range(request.max_new_tokens)]
        stops = [place for place, drawn in enumerate(answer) if drawn in request.stop_token_ids]
        answer = answer[: stops[0] + 1] if stops else answer
        np.testing.assert_array_equal(one.tokens, [*request.tokens, *answer])
        np.testing.assert_array_equal(one.sampled, [False] * request.tokens.size + [True] * len(answer))
        np.testing.assert_array_equal(one.logprobs[one.sampled], np.asarray([logprob(place) for place in range(len(answer))], np.float32))
        assert one.finish_reason[0] == (0 if stops else 1) and set(one.weight_version) == {version}
        assert (one.prompt_id[0], one.group[0], one.temperature[0]) == (request.prompt_id, request.group, request.temperature)


def collect(engine: VllmEngine, count: int) -> Trajectories:
    """Polls until so many sequences have come."""
    parts = []
    while sum(part.num_sequences for part in parts) < count:
        parts.append(engine.poll(5.0))
        health = engine.health()
        assert parts[-1].num_sequences or (health.alive and health.pending), health.detail
    return Trajectories.concat(parts)


def process_link(engine: VllmEngine) -> ProcessLink:
    """The link to the engine's present worker."""
    link = engine._worker._link
    assert isinstance(link, ProcessLink)
    return link


def kill(engine: VllmEngine) -> None:
    """kill -9 of the engine's worker."""
    process = process_link(engine)._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
