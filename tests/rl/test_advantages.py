import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.errors import UserError
from trace_jax.rl import frac_reward_zero_std, group_advantages, groups_with_signal


def f32(*values):
    return np.array(values, np.float32)


def i64(*values):
    return np.array(values, np.int64)


def test_hand_computed():
    # Group 7: rewards 1 0 0 1, mean 1/2, deviations +-1/2, sample variance (4 * 1/4) / 3 = 1/3, std 0.57735.
    # A = +-0.5 / 0.57735 = +-0.8660254 (= sqrt(3) / 2). DeepSeekMath (arXiv 2402.03300), 4.1.2.
    # Group 2: rewards 1 2 6, mean 3, deviations -2 -1 3, variance 14 / 2 = 7, std 2.6457513.
    # A = -0.7559289, -0.3779645, 1.1338934.
    rewards = f32(1, 1, 0, 2, 0, 6, 1)
    group = i64(7, 2, 7, 2, 7, 2, 7)
    expected = f32(0.8660254, -0.7559289, -0.8660254, -0.3779645, -0.8660254, 1.1338934, 0.8660254)
    got = group_advantages(rewards, group, eps=0.0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    # eps is added to the std: 0.5 / (0.5773503 + 0.1) = 0.7381707.
    np.testing.assert_allclose(group_advantages(rewards, group, eps=0.1)[0], 0.7381707, rtol=1e-6)
    # Without the std: the deviations.
    np.testing.assert_array_equal(group_advantages(rewards, group, normalize_std=False), f32(0.5, -2, -0.5, -1, -0.5, 3, 0.5))


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e-8, 1e8, 3e38, -0.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_adv_02_zero_variance_is_exactly_zero(value, size):
    rewards = np.full(size, value, np.float32)
    got = group_advantages(rewards, np.zeros(size, np.int64), eps=0.0)
    np.testing.assert_array_equal(got, np.zeros(size, np.float32))
    assert frac_reward_zero_std(rewards, np.zeros(size, np.int64)) == 1.0


def test_adv_02_a_tiny_variance_is_not_zero():
    rewards = f32(0.1, np.nextafter(np.float32(0.1), np.float32(1)))
    got = group_advantages(rewards, i64(0, 0), eps=0.0)
    np.testing.assert_allclose(got, f32(-0.70710677, 0.70710677), rtol=1e-6)  # -+(1/2) / sqrt(1/2)


def test_adv_01_all_others_equal():
    # The group in which a leave-one-out std would be 0: rewards 0 0 0 1. mean 1/4, variance (3/16 + 9/16) / 3 = 1/4.
    np.testing.assert_allclose(group_advantages(f32(0, 0, 0, 1), i64(1, 1, 1, 1), eps=0.0), f32(-0.5, -0.5, -0.5, 1.5), rtol=1e-6)


def test_adv_03_share_of_zero_variance_groups():
    rewards = f32(1, 1, 0, 1, math.nan, math.nan, 3, math.nan)
    group = i64(0, 0, 1, 1, 2, 2, 1, 1)
    # Group 0 is constant, group 1 varies, group 2 has no valid reward and is not counted.
    assert frac_reward_zero_std(rewards, group) == 0.5
    assert math.isnan(frac_reward_zero_std(f32(math.nan), i64(0)))


def test_nan_reward_is_neither_a_wrong_answer_nor_counted():
    rewards = f32(1, math.nan, 0, 1, 0)
    group = i64(0, 0, 0, 0, 0)
    got = group_advantages(rewards, group)
    assert got[1] == 0.0
    np.testing.assert_array_equal(np.delete(got, 1), group_advantages(f32(1, 0, 1, 0), i64(0, 0, 0, 0)))
    # Control: as a wrong answer it would move the others.
    assert group_advantages(np.nan_to_num(rewards), group)[0] != got[0]
    # One valid reward left: nothing to compare with.
    np.testing.assert_array_equal(group_advantages(f32(1, math.nan), i64(0, 0)), f32(0, 0))


@pytest.mark.usefixtures("unchecked")
def test_infinite_reward_and_shapes_are_refused():
    with pytest.raises(UserError, match="sequence 1 is infinite"):
        group_advantages(f32(0, math.inf), i64(0, 0))
    with pytest.raises(ValueError, match="must both have shape"):
        group_advantages(f32(0, 1), i64(0))


rewards_and_groups = st.integers(1, 24).flatmap(
    lambda size: st.tuples(
        st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 1.0, 2.5, math.nan]), min_size=size, max_size=size),
        st.lists(st.integers(-3, 3), min_size=size, max_size=size),
        st.randoms(use_true_random=False),
    )
)


@settings(max_examples=50, deadline=None)
@given(rewards_and_groups)
def test_adv_04_05_shuffling_and_sharding_change_no_bit(case):
    rewards, group, random = np.array(case[0], np.float32), np.array(case[1], np.int64), case[2]
    whole = group_advantages(rewards, group)
    order = np.array(random.sample(range(len(rewards)), len(rewards)))
    np.testing.assert_array_equal(group_advantages(rewards[order], group[order]), whole[order])
    # Shards that hold whole groups give the same values as the whole batch; group names carry no meaning.
    for name in np.unique(group):
        rows = group == name
        np.testing.assert_array_equal(group_advantages(rewards[rows], group[rows] * 1000 - 7), whole[rows])


@settings(max_examples=50, deadline=None)
@given(rewards_and_groups)
def test_adv_08_09_equals_the_loop_and_centres_each_group(case):
    rewards, group = np.array(case[0], np.float32), np.array(case[1], np.int64)
    got = group_advantages(rewards, group)
    for name in np.unique(group):
        valid = (group == name) & ~np.isnan(rewards)
        values = rewards[valid].astype(np.float64)
        if valid.sum() > 1 and len(set(values)) > 1:
            np.testing.assert_allclose(got[valid], (values - values.mean()) / (values.std(ddof=1) + 1e-6), rtol=1e-5, atol=1e-6)
        else:
            assert not got[valid].any()
        assert abs(got[valid].sum()) < 1e-5
    assert not got[np.isnan(rewards)].any()


def test_adv_03_groups_with_signal():
    rewards = f32(1, 1, 0, 1, math.nan, math.nan, 3, math.nan, 0, 5)
    group = i64(9, 9, 4, 4, 2, 2, 4, 4, 1, 1)
    # 9 is constant, 4 varies, 2 has no valid reward, 1 varies; a group of one valid reward has nothing to compare with.
    np.testing.assert_array_equal(groups_with_signal(rewards, group), [1, 4])
    assert groups_with_signal(f32(1, math.nan), i64(0, 0)).size == 0
    # Exactly the groups with an advantage.
    found = np.unique(group[group_advantages(rewards, group) != 0])
    np.testing.assert_array_equal(groups_with_signal(rewards, group), found)
