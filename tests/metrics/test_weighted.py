import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import MaxMetric, WeightedMetric, combine, finalize


def test_len_02_combining_is_a_weighted_mean_not_a_mean_of_means():
    # 3 values with sum 6 and 1 value of 10: 16 / 4 = 4; the mean of the means 2 and 10 would be 6.
    parts = [{"x": WeightedMetric(6.0, 3)}, {"x": WeightedMetric(10.0, 1)}, {"y": MaxMetric(2.0)}, {"y": MaxMetric(5.0)}]
    assert finalize(combine(parts)) == {"x": 4.0, "y": 5.0}
    assert finalize(combine(parts), prefix="unguided/") == {"unguided/x": 4.0, "unguided/y": 5.0}


def test_nothing_counted_is_nan_and_nothing_to_combine_is_empty():
    assert np.isnan(finalize({"x": WeightedMetric(0.0, 0)})["x"])
    assert combine([]) == {}


def test_counts_stay_exact_above_2_to_the_24():
    part = {"x": WeightedMetric(jnp.float32(0.0), jnp.int32(2**24 + 1))}
    total = combine([part, part])["x"]
    assert isinstance(total, WeightedMetric)
    assert int(total.count) == 2**25 + 2


def test_sums_are_added_in_float64():
    # 2^24 + 1 + 1 is lost in float32.
    parts = [{"x": WeightedMetric(jnp.float32(v), jnp.int32(1))} for v in (2.0**24, 1.0, 1.0)]
    total = combine(parts)["x"]
    assert isinstance(total, WeightedMetric)
    assert float(total.sum) == 2.0**24 + 2


def test_nan_is_not_hidden_by_a_maximum():
    assert np.isnan(finalize(combine([{"y": MaxMetric(1.0)}, {"y": MaxMetric(float("nan"))}]))["y"])
    assert np.isnan(float(MaxMetric(jnp.float32(jnp.nan)).merge(MaxMetric(jnp.float32(1.0))).maximum))


def test_a_name_is_one_kind_of_metric():
    with pytest.raises(ValueError, match="'x' is a mean in one part"):
        combine([{"x": WeightedMetric(1.0, 1)}, {"x": MaxMetric(1.0)}])


def test_is_a_pytree_and_merges_under_jit():
    merged = jax.jit(lambda a, b: a.merge(b))(
        WeightedMetric(jnp.ones(2), jnp.arange(2)), WeightedMetric(jnp.ones(2), jnp.ones(2, jnp.int32))
    )
    np.testing.assert_array_equal(merged.mean(), [2.0, 1.0])
