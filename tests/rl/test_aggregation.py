"""Three aggregations: hand-computed, and the same for any division of the batch into rows and micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import combine, finalize
from trace_jax.rl import (
    Correction,
    PolicyLoss,
    batch_total,
    correction_stats,
    normalized,
    policy_loss_sum,
    rollout_weights,
    sequence_divisors,
)

# A sequence of three tokens, one of one, one without any (a padded row, or an aborted answer), with advantages 2, -1 and 4.
MASK = jnp.array([[True, True, True], [False, True, False], [False, False, False]])
LENGTHS = np.array([3, 1, 0])
ZERO = jnp.zeros((3, 3), jnp.float32)
ADVANTAGES = jnp.array([2.0, -1.0, 4.0], jnp.float32)


@pytest.mark.parametrize(
    ("aggregation", "factor", "expected"),
    [
        # On policy the objective of a token is its advantage: 2 2 2 | -1.
        ("token_mean", 1, -(6 - 1) / 4),
        ("seq_mean_token_mean", 1, -(2 - 1) / 2),
        ("seq_mean_token_sum_norm", 10, -(6 - 1) / (2 * 10)),
        ("seq_mean_token_sum_norm", 1, -(6 - 1) / 2),
    ],
)
def test_len_06_hand_computed_with_a_padded_row(aggregation, factor, expected):
    divisors = sequence_divisors(LENGTHS, aggregation)
    per_token = None if divisors is None else jnp.broadcast_to(jnp.asarray(divisors)[:, None], MASK.shape)
    value, _ = policy_loss_sum(ZERO, ZERO, ADVANTAGES, MASK, divisors=per_token, loss=PolicyLoss())
    np.testing.assert_allclose(normalized(value, batch_total(LENGTHS, aggregation, factor)), expected, rtol=1e-6)


def test_an_empty_batch_has_loss_zero():
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"):
        assert normalized(jnp.float32(0), batch_total(np.zeros(2, np.int64), aggregation, 7)) == 0


SIZES = (5, 1, 3, 2, 4, 1)
"""Sampled tokens of the sequences; each has one more token, its prompt."""
PAIRS = (
    (PolicyLoss(), Correction("mis", "sequence", 1.5)),
    (PolicyLoss("cispo", clip_low=1.0, clip_high=0.1), Correction("icepop", "token", 1.2, 0.8)),
    (PolicyLoss(ratio_level="geometric", clip_low=0.05, clip_high=0.05), Correction("icepop", "geometric", 1.1, 0.9)),
    (PolicyLoss(ratio_level="geometric", clip_low=0.05, clip_high=0.05, clip_c=1.05), Correction("tis", "sequence", 1.2)),
)


def sequences():
    """Per sequence its columns, prompt first."""
    rng = np.random.default_rng(5)
    parts = []
    for size in SIZES:
        old = -rng.random(size + 1).astype(np.float32)
        near = (0.2 * rng.normal(size=(2, size + 1))).astype(np.float32)
        parts.append(
            {
                "logp": old + near[0],
                "logp_old": old,
                "logp_rollout": old + near[1],
                "advantages": np.full(size + 1, rng.normal(), np.float32),
                "mask": np.arange(size + 1) > 0,
                "divisors": np.full(size + 1, size, np.float32),
            }
        )
    return parts


def in_rows(parts, rows, length):
    """Arrays `[B, length]` with the sequences of each row one after the other, garbage between them and NaN behind."""
    columns = {name: np.full((len(rows), length), 0 if name == "mask" else np.nan, part.dtype) for name, part in parts[0].items()}
    columns["segment_ids"] = np.zeros((len(rows), length), np.int32)
    for row, members in enumerate(rows):
        start = 0
        for number, member in enumerate(members, 1):
            size = parts[member]["mask"].size
            for name, values in parts[member].items():
                columns[name][row, start : start + size] = values
            columns["segment_ids"][row, start : start + size] = number
            start += size
    return {name: jnp.asarray(values) for name, values in columns.items()}


def by_sequence(values, rows):
    """A `[B, T]` array as one array per sequence."""
    found = {}
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            found[member] = np.asarray(values)[row, start : start + SIZES[member] + 1]
            start += SIZES[member] + 1
    return [found[index] for index in range(len(SIZES))]


UNPACKED = [[0], [1], [2], [3], [4], [5]]
PACKED = [[2, 0], [3, 1, 5], [4]]


@jax.jit
def gradient_and_stats(batch):
    """For every pair of loss and correction the loss sum, its gradient and all statistics."""
    results = {}
    segments, mask = batch["segment_ids"], batch["mask"]
    for loss, correction in PAIRS:
        weights = rollout_weights(batch["logp_old"], batch["logp_rollout"], mask, segments, **correction._asdict())

        def loss_sum(logp, loss=loss, weights=weights):
            return policy_loss_sum(logp, batch["logp_old"], batch["advantages"], mask, weights, batch["divisors"], segments, loss=loss)

        (value, stats), gradient = jax.value_and_grad(loss_sum, has_aux=True)(batch["logp"])
        stats |= correction_stats(weights, batch["logp_old"], batch["logp_rollout"], mask, segments, correction)
        results[str((loss, correction))] = value, gradient, stats
    return results


def test_packing_and_micro_batches_change_nothing():
    """Packed == one sequence a row == two micro-batches, for every pair; the sum alone is divided, once."""
    parts = sequences()
    whole = gradient_and_stats(in_rows(parts, UNPACKED, 6))
    packed = gradient_and_stats(in_rows(parts, PACKED, 10))
    halves = [gradient_and_stats(in_rows(parts, rows, 10)) for rows in ([*PACKED[:1], []], PACKED[1:])]
    for name, (value, gradient, stats) in whole.items():
        assert np.isfinite(value) and np.abs(gradient).max() > 0, name
        np.testing.assert_allclose(packed[name][0], value, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(sum(float(half[name][0]) for half in halves), value, rtol=1e-5, atol=1e-6, err_msg=name)
        expected = by_sequence(gradient, UNPACKED)
        for got, want in zip(by_sequence(packed[name][1], PACKED), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6, err_msg=name)
        figures = finalize(combine([stats]))
        assert finalize(combine([packed[name][2]])) == pytest.approx(figures, rel=1e-5, abs=1e-6), name
        assert finalize(combine([half[name][2] for half in halves])) == pytest.approx(figures, rel=1e-5, abs=1e-6), name
    assert any(0 < finalize(stats)["policy/clip_fraction"] < 1 for _, _, stats in whole.values())
    assert any(0 < finalize(stats).get("rollout_corr/rollout_rs_masked_fraction", 0) < 1 for _, _, stats in whole.values())


def test_rows_taken_as_sequences_give_another_loss():
    """The control of the test above: without its segments a packed row has one ratio and one weight."""
    packed = in_rows(sequences(), PACKED, 10)
    right, wrong = gradient_and_stats(packed), gradient_and_stats(packed | {"segment_ids": (packed["segment_ids"] > 0).astype(jnp.int32)})
    by_token = str(PAIRS[1])
    for pair in PAIRS:
        same = np.allclose(right[str(pair)][0], wrong[str(pair)][0], rtol=1e-3)
        assert same == (str(pair) == by_token), pair
