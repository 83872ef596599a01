import numpy as np
import pytest

from trace_jax.rl import overlong_penalty


def test_hand_computed():
    # DAPO (arXiv 2503.14476) eq. 13, L_max 20, L_cache 4: 0 up to 16, then (16 - |y|) / 4, -1 at 20 and beyond; times 0.5.
    lengths = np.array([0, 15, 16, 17, 18, 20, 25])
    got = overlong_penalty(lengths, max_length=20, buffer=4, factor=0.5)
    np.testing.assert_array_equal(got, np.array([0, 0, 0, -0.125, -0.25, -0.5, -0.5], np.float32))
    assert got.dtype == np.float32
    # The paper's own sizes: 16384 + 4096.
    np.testing.assert_array_equal(overlong_penalty(np.array([16384, 18432, 20480]), max_length=20480, buffer=4096), [0, -0.5, -1])


@pytest.mark.parametrize("buffer", [0, 21])
def test_an_impossible_buffer_is_refused(buffer):
    with pytest.raises(ValueError, match="must lie within 1 and the longest answer 20"):
        overlong_penalty(np.array([1]), max_length=20, buffer=buffer)
