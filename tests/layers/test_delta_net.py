"""The gated delta rule and its convolution against loops in float64, with packed rows, padding and a state that is carried on."""

import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.layers.delta_net import causal_convolution, gated_delta_rule, last_inputs

POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 2, 3, 4]], np.int32)
"""Two packed sequences in each row."""
COUNTING = np.ones((2, 8), bool)


def tokens(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"query": (2, 8, 3, 4), "key": (2, 8, 3, 4), "value": (2, 8, 3, 5)}
    made = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    made["key"] /= np.linalg.norm(made["key"], axis=-1, keepdims=True)
    return made | {"decay": -rng.uniform(0, 1, (2, 8, 3)), "strength": rng.uniform(0, 1, (2, 8, 3))}


def loop(given: dict[str, np.ndarray], state: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    read, state = np.zeros(given["value"].shape), state.astype(np.float64).copy()
    for b, t, h in np.ndindex(*given["decay"].shape):
        if positions[b, t] == 0:
            state[b, h] = 0
        key, value = given["key"][b, t, h], given["value"][b, t, h]
        faded = state[b, h] * np.exp(given["decay"][b, t, h])
        state[b, h] = faded + given["strength"][b, t, h] * np.outer(key, value - key @ faded)
        read[b, t, h] = given["query"][b, t, h] @ state[b, h]
    return read, state


def run(given: dict[str, np.ndarray], state: np.ndarray, positions: np.ndarray, counting: np.ndarray):
    arrays = {name: jnp.asarray(values, jnp.float32) for name, values in (given | {"state": state}).items()}
    return gated_delta_rule(**arrays, positions=jnp.asarray(positions), counting=jnp.asarray(counting))


def test_packed_rows_equal_a_loop():
    given, state = tokens(), np.ones((2, 3, 4, 5))
    read, last = run(given, state, POSITIONS, COUNTING)
    expected, state = loop(given, state, POSITIONS)
    np.testing.assert_allclose(read, expected, atol=1e-5)
    np.testing.assert_allclose(last, state, atol=1e-5)
    assert np.max(np.abs(loop(given, np.ones((2, 3, 4, 5)), POSITIONS + 1)[0] - expected)) > 0.1, "a state that is not reset shows"


def test_a_state_is_carried_from_one_call_to_the_next_and_padding_leaves_it():
    given, zeros = tokens(1), np.zeros((2, 3, 4, 5))
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), (2, 8))
    whole = run(given, zeros, positions, COUNTING)
    first = run(given, zeros, positions, positions < 5)
    rest = run({name: values[:, 5:] for name, values in given.items()}, np.asarray(first[1]), positions[:, 5:], COUNTING[:, 5:])
    np.testing.assert_allclose(rest[0], whole[0][:, 5:], atol=1e-6)
    np.testing.assert_allclose(rest[1], whole[1], atol=1e-6)


@pytest.mark.parametrize("taps", [2, 4])
def test_the_convolution_stays_within_its_sequence_and_continues(taps: int):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 8, 6)), rng.standard_normal((6, taps))
    zeros = jnp.zeros((2, taps - 1, 6), jnp.float32)
    expected = np.zeros_like(x)
    for b, t, back in np.ndindex(2, 8, taps):
        if back <= POSITIONS[b, t]:
            expected[b, t] += weight[:, taps - 1 - back] * x[b, t - back]
    expected *= 1 / (1 + np.exp(-expected))
    values, weights = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    np.testing.assert_allclose(causal_convolution(values, weights, zeros, jnp.asarray(POSITIONS)), expected, atol=1e-5)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), (2, 8))
    whole = causal_convolution(values, weights, zeros, positions)
    # A row counts five tokens, the other three: each continues behind its own last one.
    counts = np.array([5, 3])
    earlier = last_inputs(values, zeros, jnp.asarray(np.arange(8) < counts[:, None]))
    following = jnp.stack([values[b, count : count + 1] for b, count in enumerate(counts)])
    found = causal_convolution(following, weights, earlier, jnp.asarray(counts[:, None], jnp.int32))
    np.testing.assert_allclose(found[:, 0], [whole[b, count] for b, count in enumerate(counts)], atol=1e-6)
