import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import WeightedMetric, combine
from trace_jax.rl import answer_positions, entropy_stats, finalize, mismatch_stats, position_gap_stats

LN = np.log
jitted_stats = jax.jit(mismatch_stats)
# d = logp_train - logp_rollout: [ln 2, 0, -ln 2 | padding], [ln 8], and a row without sampled tokens.
GAP = np.array([[LN(2), 0.0, -LN(2)], [np.nan, LN(8), np.nan], [np.nan] * 3], np.float32)
LOGP_ROLLOUT = jnp.full((3, 3), -3.0, jnp.float32)
LOGP_TRAIN = LOGP_ROLLOUT + GAP
MASK = jnp.array([[True, True, True], [False, True, False], [False] * 3])
# Formulas of verl's rollout_corr helper and NeMo RL. rho = 2, 1, 1/2, 8; ln 2 = 0.6931472; four tokens, two sequences.
EXPECTED = {
    "rollout_corr/kl": -3 * LN(2) / 4,  # mean(-d): -(ln 2 + 0 - ln 2 + 3 ln 2) / 4
    "rollout_corr/k3_kl": ((1 - LN(2)) + 0 + (-0.5 + LN(2)) + (7 - 3 * LN(2))) / 4,
    "rollout_corr/log_ppl_abs_diff": (0 + 3 * LN(2)) / 2,  # |mean d| of the sequences: 0 and ln 8
    "rollout_corr/chi2_token": (4 + 1 + 0.25 + 64) / 4 - 1,
    "rollout_corr/rollout_is_mean": 11.5 / 4,
    "rollout_corr/rollout_is_ratio_fraction_high": 1 / 4,  # 8 > 5
    "train_rollout_logprob_abs_diff": 5 * LN(2) / 4,
    "train_rollout_logprob_abs_diff_max": 3 * LN(2),
    "token_mult_prob_error": (2 + 1 + 2 + 8) / 4,
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_hand_computed_with_the_names_of_the_design(transform):
    figures = finalize(transform(mismatch_stats)(LOGP_TRAIN, LOGP_ROLLOUT, MASK))
    assert set(figures) == set(EXPECTED)
    for name, value in EXPECTED.items():
        np.testing.assert_allclose(figures[name], value, rtol=2e-6, err_msg=name)


def test_prefix_names_the_forward():
    stats = mismatch_stats(LOGP_TRAIN, LOGP_ROLLOUT, MASK, prefix="unguided/")
    assert set(stats) == {"unguided/" + name for name in EXPECTED}


def test_no_mismatch_gives_exact_zeros_and_ones():
    figures = finalize(mismatch_stats(LOGP_ROLLOUT, LOGP_ROLLOUT, MASK))
    ones = {"rollout_corr/rollout_is_mean", "token_mult_prob_error"}
    assert figures == {name: float(name in ones) for name in EXPECTED}


def test_k3_is_accurate_and_never_negative_for_small_gaps():
    gaps = np.concatenate([np.logspace(-6, 1, 400), -np.logspace(-6, 1, 400)]).astype(np.float32)
    for gap in np.split(gaps, 8):
        zeros = jnp.zeros((1, len(gap)), jnp.float32)
        got = finalize(jitted_stats(jnp.asarray(gap)[None], zeros, jnp.ones_like(zeros, bool)))["rollout_corr/k3_kl"]
        wide = gap.astype(np.float64)
        exact = np.mean(np.where(np.abs(wide) < 1e-3, wide**2 / 2 + wide**3 / 6 + wide**4 / 24, np.expm1(wide) - wide))
        assert got >= 0
        np.testing.assert_allclose(got, exact, rtol=1e-5)


def test_mis_07_one_outlier_shows_in_the_maximum_and_not_only_in_the_mean():
    tokens = 1000
    train = jnp.zeros((1, tokens), jnp.float32).at[0, 17].set(30.0)
    figures = finalize(jitted_stats(train, jnp.zeros_like(train), jnp.ones_like(train, bool)))
    # The mean of exp |d| explodes at once (exp is clamped at 20); the mean |d| does not; the maximum names the outlier.
    assert figures["token_mult_prob_error"] == pytest.approx(np.exp(20) / tokens, rel=1e-3)
    assert figures["train_rollout_logprob_abs_diff"] == pytest.approx(0.03)
    assert figures["train_rollout_logprob_abs_diff_max"] == 30.0


def random_case(rows=6, tokens=9):
    keys = jax.random.split(jax.random.key(0), 3)
    rollout = -jax.random.uniform(keys[0], (rows, tokens)) * 4
    return rollout + 0.3 * jax.random.normal(keys[1], (rows, tokens)), rollout, jax.random.bernoulli(keys[2], 0.6, (rows, tokens))


@pytest.mark.parametrize("borders", [[3], [1, 2, 3, 4, 5], [2, 5]])
def test_len_02_any_split_into_micro_batches_gives_the_same_figures(borders):
    arrays = random_case()
    expected = finalize(combine([jitted_stats(*arrays)]))
    parts = zip(*(jnp.split(x, borders) for x in arrays), strict=True)
    assert finalize(combine([jitted_stats(*part) for part in parts])) == pytest.approx(expected, rel=1e-6)


def test_len_02_merging_inside_jit_equals_combining_on_the_host():
    arrays = tuple(x.reshape(3, 2, 9) for x in random_case())

    @jax.jit
    def scanned(arrays):
        first = jitted_stats(*(x[0] for x in arrays))

        def body(total, part):
            stats = jitted_stats(*part)
            return {name: total[name].merge(stats[name]) for name in total}, None

        return jax.lax.scan(body, first, tuple(x[1:] for x in arrays))[0]

    host = combine([jitted_stats(*(x[i] for x in arrays)) for i in range(3)])
    assert finalize(scanned(arrays)) == pytest.approx(finalize(host), rel=1e-6)


def test_an_empty_batch_has_no_mean():
    figures = finalize(jitted_stats(LOGP_TRAIN, LOGP_ROLLOUT, jnp.zeros_like(MASK)))
    assert figures.pop("train_rollout_logprob_abs_diff_max") == 0.0
    assert all(np.isnan(value) for value in figures.values())


def test_positions_count_sampled_tokens_from_zero():
    mask = jnp.array([[False, True, True, False, True], [False] * 5])
    np.testing.assert_array_equal(answer_positions(mask), [[-1, 0, 1, -1, 2], [-1] * 5])


def packed(x, fill):
    """The three rows of the hand-computed case one after the other in one row of twelve, padding in between."""
    return jnp.pad(x, ((0, 0), (0, 1)), constant_values=fill).reshape(1, 12)


SEGMENTS = jnp.array([[1, 1, 1, 0, 2, 2, 2, 0, 3, 3, 3, 0]], jnp.int32)


def test_sync_18_packed_rows_give_the_figures_of_their_sequences():
    arrays = packed(LOGP_TRAIN, jnp.nan), packed(LOGP_ROLLOUT, jnp.nan), packed(MASK, False)
    figures = finalize(jitted_stats(*arrays, SEGMENTS))
    assert figures == pytest.approx(EXPECTED, rel=2e-6)
    # Control: taken as one sequence the row has |mean d| = 3 ln 2 / 4.
    wrong = finalize(jitted_stats(*arrays))["rollout_corr/log_ppl_abs_diff"]
    assert wrong == pytest.approx(3 * LN(2) / 4) and wrong < 0.6 * figures["rollout_corr/log_ppl_abs_diff"]


def test_a_row_full_of_one_token_sequences_has_a_slot_for_each():
    gap = jnp.asarray([[1.0, 2.0, 3.0, 4.0], [0.0, 5.0, 0.0, 0.0]], jnp.float32)
    segments = jnp.array([[1, 2, 3, 4], [1, 2, 3, 4]], jnp.int32)
    figures = finalize(jitted_stats(gap, jnp.zeros_like(gap), jnp.ones_like(gap, bool), segments))
    assert figures["rollout_corr/log_ppl_abs_diff"] == pytest.approx(15 / 8)


def test_positions_restart_with_each_packed_sequence():
    mask = jnp.array([[False, True, True, True, False, False, True, False], [True] * 8])
    segments = jnp.array([[1, 1, 1, 2, 2, 3, 3, 0], [1, 2, 3, 3, 3, 4, 4, 4]], jnp.int32)
    np.testing.assert_array_equal(answer_positions(mask, segments), [[-1, 0, 1, 0, -1, -1, 0, -1], [0, 0, 0, 1, 2, 0, 1, 2]])
    unpacked = position_gap_stats(LOGP_TRAIN, LOGP_ROLLOUT, MASK, num_positions=3)
    arrays = packed(LOGP_TRAIN, jnp.nan), packed(LOGP_ROLLOUT, jnp.nan), packed(MASK, False)
    stats = position_gap_stats(*arrays, SEGMENTS, num_positions=3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), stats, unpacked)


def test_gap_by_position_hand_computed():
    # Row 0 has positions 0 1 2 with d = ln 2, 0, -ln 2; row 1 has position 0 with d = ln 8. P = 4: the last stays empty.
    function = jax.jit(position_gap_stats, static_argnames="num_positions")
    stats = function(LOGP_TRAIN, LOGP_ROLLOUT, MASK, num_positions=4)
    gap = stats["position/train_rollout_logprob_abs_diff"]
    assert isinstance(gap, WeightedMetric)
    np.testing.assert_array_equal(gap.count, [2, 1, 1, 0])
    np.testing.assert_allclose(gap.mean(), [2 * LN(2), 0.0, LN(2), np.nan], rtol=1e-6)
    kl = stats["position/rollout_corr/kl"]
    assert isinstance(kl, WeightedMetric)
    np.testing.assert_allclose(kl.mean(), [-2 * LN(2), 0.0, LN(2), np.nan], rtol=1e-6)
    # P = 2: the token at position 2 is left out, nothing wraps around.
    short = function(LOGP_TRAIN, LOGP_ROLLOUT, MASK, num_positions=2)["position/rollout_corr/kl"]
    assert isinstance(short, WeightedMetric)
    np.testing.assert_allclose(short.mean(), [-2 * LN(2), 0.0], rtol=1e-6)
    # Positions of micro-batches combine like every metric.
    halves = [function(LOGP_TRAIN[i], LOGP_ROLLOUT[i], MASK[i], num_positions=4) for i in (slice(0, 1), slice(1, 3))]
    joined = combine(halves)["position/rollout_corr/kl"]
    assert isinstance(joined, WeightedMetric)
    np.testing.assert_allclose(joined.mean(), kl.mean(), rtol=1e-6)


def test_entropy_ignores_the_padding():
    entropy = jnp.array([[1.0, 2.0, jnp.nan], [jnp.nan, 6.0, jnp.nan], [jnp.nan] * 3], jnp.float32)
    mask = jnp.array([[True, True, False], [False, True, False], [False] * 3])
    assert finalize(entropy_stats(entropy, mask)) == {"policy/entropy": 3.0}


def test_public_names():
    import trace_jax.rl as rl

    assert sorted(rl.__all__) == rl.__all__
    assert all(hasattr(rl, name) for name in rl.__all__)
