"""The cache stores what the attention reads, in the bytes that were promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_format, fake_quant
from trace_jax.layers.kv_cache import append, init_cache, read
from trace_jax.quantization.plan import UNQUANTIZED, SitePlan, rollout_plan
from trace_jax.quantization.sites import round_site

L, B, S, K = 2, 3, 5, 2


def plan_of(fmt, per_token=False):
    return rollout_plan("bf16", "bf16", fmt, fmt, per_token)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
def test_kv_05_bytes_equal_the_estimate(head_dim):
    """NVFP4: D/2 + D/16 bytes per head and token and side; MXFP4: D/2 + D/32 with whole blocks."""
    tokens_and_heads = 2 * L * B * S * K

    def allocated(plan):
        return sum(leaf.nbytes for leaf in jax.tree.leaves(init_cache(L, B, S, K, head_dim, plan, jnp.dtype("bfloat16"))))

    assert allocated(plan_of("nvfp4")) == tokens_and_heads * (head_dim // 2 + head_dim // 16)
    for name in ("nvfp4", "mxfp4"):
        fmt = block_format(name)
        assert allocated(plan_of(name)) == tokens_and_heads * (fmt.codes_bytes(head_dim) + fmt.scales_bytes(head_dim))
    assert allocated(UNQUANTIZED) == tokens_and_heads * 2 * head_dim
    per_token = allocated(plan_of("nvfp4", per_token=True)) - allocated(plan_of("nvfp4"))
    assert per_token == 2 * L * B * S * 4


def test_kv_06_keys_and_values_have_their_own_format():
    cache = init_cache(L, B, S, K, 32, rollout_plan("bf16", "bf16", "nvfp4", "bf16"), jnp.dtype("bfloat16"))
    assert (cache.k.format, cache.v.format) == ("nvfp4", "bf16")
    assert cache.k.data.dtype == jnp.uint8 and cache.k.scales is not None
    assert cache.v.data.dtype == jnp.bfloat16 and cache.v.scales is None


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4", "mxfp4", "per_token"])
@pytest.mark.parametrize("head_dim", [24, 32])
def test_what_is_read_equals_what_was_rounded(fmt, head_dim):
    per_token = fmt == "per_token"
    name = "nvfp4" if per_token else fmt
    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, 3, K, head_dim)) * 3, jnp.bfloat16)
    static = jnp.float32(2.0**-7) if name == "nvfp4" else None
    rounded, captured = round_site("k", x, SitePlan(name), static, per_token=per_token, capture=True)
    cache = init_cache(L, B, S, K, head_dim, plan_of(name, per_token), jnp.dtype("bfloat16"))
    positions = jnp.asarray([[0, 1, 2], [2, 3, 4], [1, 2, 3]])
    side = append(cache.k, jnp.int32(1), positions, rounded, captured)
    stored = read(side, jnp.int32(1), head_dim, static, jnp.dtype("bfloat16"))
    assert stored.shape == (B, S, K, head_dim) and stored.dtype == jnp.bfloat16
    for row in range(B):
        np.testing.assert_array_equal(stored[row, positions[row]], rounded[row])
    assert not np.any(read(side, jnp.int32(0), head_dim, static, jnp.dtype("bfloat16")))
    if fmt == "mxfp4":
        np.testing.assert_array_equal(rounded, fake_quant(x, block_format("mxfp4")))


def test_positions_beyond_the_cache_are_dropped():
    cache = init_cache(L, B, S, K, 16, UNQUANTIZED, jnp.dtype("float32"))
    side = append(cache.v, jnp.int32(0), jnp.full((B, 1), S, jnp.int32), jnp.ones((B, 1, K, 16)), None)
    assert cache.num_slots == S and not np.any(side.data)
