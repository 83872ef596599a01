"""The engine protocol: requests, update checksums, and `generate` on a small engine that really implements it."""

import ml_dtypes
import numpy as np
import pytest
from ragged_batches import random_trajectories

from trace_jax.errors import UserError
from trace_jax.rollout import (
    Ack,
    Capabilities,
    Engine,
    FinishReason,
    Health,
    LayerUpdate,
    Request,
    Trajectories,
    UpdateDigest,
    generate,
)


class EchoEngine:
    """Answers every prompt with its own first token, `batch` sequences a poll, last request first."""

    def __init__(self, batch=2, dies_after=None, forgets=()):
        self.waiting = []
        self.batch = batch
        self.dies_after = dies_after
        self.forgets = set(forgets)
        self.aborted = []
        self.paused = False
        self.version = 0

    def submit(self, requests):
        self.waiting.extend(requests)

    def poll(self, timeout=0.0):
        if not self.health().alive or self.paused:
            return Trajectories.empty()
        ready = [request for request in self.waiting if request.sample_id not in self.forgets][-self.batch :]
        self.waiting = [request for request in self.waiting if request not in ready]
        if self.dies_after is not None:
            self.dies_after -= 1
        return Trajectories.concat([self.answer(request) for request in reversed(ready)])

    def answer(self, request):
        size = request.tokens.size + 1
        one = random_trajectories([size], guidance=None, routes=False)
        return one.replace(
            tokens=np.append(request.tokens, request.tokens[0]),
            sampled=np.arange(size) == size - 1,
            logprobs=np.zeros(size, np.float32),
            sample_id=np.asarray([request.sample_id], np.uint64),
            finish_reason=np.asarray([FinishReason.LENGTH], np.uint8),
        )

    def abort(self, sample_ids):
        self.aborted.extend(sample_ids)

    def pause(self, mode="wait"):
        self.paused = True

    def resume(self):
        self.paused = False

    def update_weights(self, updates, version):
        digest = UpdateDigest()
        for _ in digest.observe(updates):
            pass
        self.version = version
        return digest.ack(version)

    def capabilities(self):
        return Capabilities("bf16", "bf16", "bf16", "bf16", "bf16", "echo", (), False)

    def health(self):
        alive = self.dies_after is None or self.dies_after > 0
        return Health(alive, "fine" if alive else "out of memory", len(self.waiting), self.paused, self.version)

    def close(self):
        self.waiting = []


def requests_for(ids):
    return [Request(sample_id=i, prompt_id=i, group=0, tokens=np.asarray([i % 50, 1], np.int32), max_new_tokens=1) for i in ids]


def test_generate_returns_the_order_of_the_requests():
    engine = EchoEngine()
    assert isinstance(engine, Engine)
    ids = [7, 2**63 + 5, 3, 11, 5]
    result = generate(engine, requests_for(ids))
    result.validate()
    assert result.sample_id.tolist() == ids
    assert [int(result.sequence(i).tokens[-1]) for i in range(5)] == [i % 50 for i in ids]
    assert generate(engine, []).num_sequences == 0


def test_generate_raises_when_the_engine_dies():
    with pytest.raises(RuntimeError, match="3 of 5 requests unfinished: out of memory"):
        generate(EchoEngine(dies_after=1), requests_for(range(5)))


def test_generate_never_waits_silently():
    engine = EchoEngine(forgets=[1])
    with pytest.raises(TimeoutError, match="1 of 3 requests were aborted"):
        generate(engine, requests_for(range(3)), stall_seconds=0.01)
    assert engine.aborted == [1]
    engine = EchoEngine()
    engine.pause()
    with pytest.raises(RuntimeError, match="paused"):
        generate(engine, requests_for(range(3)))


def test_generate_refuses_doubled_and_foreign_samples():
    with pytest.raises(ValueError, match="sample_id"):
        generate(EchoEngine(), requests_for([1, 1]))
    engine = EchoEngine()
    engine.submit(requests_for([9]))
    with pytest.raises(RuntimeError, match="sample 9"):
        generate(engine, requests_for([1]), stall_seconds=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "no tokens"),
        ({"tokens": [[1]]}, "no tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_impossible_requests_are_refused(change, message):
    fields = {"sample_id": 3, "prompt_id": 0, "group": 0, "tokens": [1], "max_new_tokens": 4}
    with pytest.raises(UserError, match=f"request 3: .*{message}"):
        Request(**{**fields, **change})


def layer(index, **tensors):
    return LayerUpdate(index, {f"model.layers.{index}.{name}": value for name, value in tensors.items()})


def checksum_of(updates):
    digest = UpdateDigest()
    for update in updates:
        digest.add(update)
    return digest.ack(0).checksum


def test_checksum_ignores_order_and_sees_every_change():
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 256, (4, 6), dtype=np.uint8), np.float32(0.5)
    norm = rng.standard_normal(8).astype(ml_dtypes.bfloat16)
    updates = [layer(0, codes=codes, scale=scale), layer(1, codes=codes, norm=norm)]
    reference = checksum_of(updates)
    assert checksum_of([updates[1], updates[0]]) == reference
    assert checksum_of([LayerUpdate(None, {**updates[1].tensors, **updates[0].tensors})]) == reference
    flipped = codes.copy()
    flipped[3, 5] ^= 1
    for other in (
        [layer(0, codes=flipped, scale=scale), updates[1]],
        [layer(0, codes=codes.reshape(6, 4), scale=scale), updates[1]],
        [layer(0, codes=codes.view(np.int8), scale=scale), updates[1]],
        [layer(0, codes=codes, scale=np.asarray([0.5], np.float32)), updates[1]],
        [updates[0], layer(2, codes=codes, norm=norm)],
        [updates[0]],
    ):
        assert checksum_of(other) != reference
    assert checksum_of([layer(0, codes=np.asfortranarray(codes), scale=scale), updates[1]]) == reference


@pytest.mark.parametrize("values", (256, 2), ids=("random", "two values"))
def test_checksum_sees_every_change_of_a_large_tensor(values: int):
    """Rows of 8 KiB, their end, and what fills none."""
    rng = np.random.default_rng(1)
    data = rng.integers(0, values, 70 * 8192 + 13, dtype=np.uint8)
    words = data[: data.size // 8 * 8].view(np.uint64)
    reference = checksum_of([layer(0, codes=data)])
    for index in (0, 8191, 8192, 32 * 8192 - 1, 70 * 8192 - 1, 70 * 8192, data.size - 1, *rng.integers(0, data.size, 10)):
        for bit in (0, 7):
            data[index] ^= 1 << bit
            assert checksum_of([layer(0, codes=data)]) != reference
            data[index] ^= 1 << bit
    exchanged = 0
    for one, other in (
        (0, 1),
        (3, 3 + 1024),
        (3, 3 + 32 * 1024),
        (5, 1024 * 7 + 9),
        (0, words.size - 1),
        *rng.integers(0, words.size, (20, 2)),
    ):
        exchanged += words[one] != words[other]
        words[[one, other]] = words[[other, one]]
        assert (checksum_of([layer(0, codes=data)]) != reference) == (words[one] != words[other])
        words[[one, other]] = words[[other, one]]
    assert exchanged > 15
    assert checksum_of([layer(0, codes=data[:-8192])]) != reference
    assert checksum_of([layer(0, codes=data)]) == reference


def test_both_ends_of_a_stream_agree():
    import jax.numpy as jnp

    updates = [
        layer(0, weight=jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)),
        LayerUpdate(None, {"lm_head.weight": np.ones((2, 2), np.float32)}),
    ]
    trainer = UpdateDigest()
    ack = EchoEngine().update_weights(trainer.observe(updates), 5)
    assert ack == trainer.ack(5) == Ack(2, checksum_of(updates), 5)


def test_a_tensor_sent_twice_raises():
    with pytest.raises(ValueError, match="twice"):
        checksum_of([layer(0, a=np.zeros(1)), layer(0, a=np.zeros(1))])
