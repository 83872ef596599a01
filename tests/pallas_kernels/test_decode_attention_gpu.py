"""The shared tests of `decode_attention` and `append` on a GPU, larger caches, and the ways to cut the work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import MXFP4, NVFP4
from pallas_kernels.decode_attention import pallas
from pallas_kernels.decode_attention.api import decode_attention
from tests.pallas_kernels.base_decode_attention import AppendBase, DecodeAttentionBase, problem, worst

pytestmark = pytest.mark.gpu


class TestReferenceOnGpu(DecodeAttentionBase, AppendBase):
    implementation = "reference"


class TestPallasOnGpu(DecodeAttentionBase, AppendBase):
    implementation = "pallas"


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("fmt", (NVFP4, MXFP4), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("group", (1, 4, 6, 8, 16))
def test_long_ragged_sequences(head_dim, fmt, group):
    query, cache = problem(head_dim, fmt, group, lengths=(1000, 64, 0, 1023, 512), pages=8, page_size=128, seed=group)
    out = decode_attention(query, cache, head_dim**-0.5, implementation="pallas")
    assert worst(out, query, cache, head_dim**-0.5) < 2


@pytest.mark.parametrize("tile", (16, 32, 64, 128))
@pytest.mark.parametrize("warps", (1, 2, 4))
@pytest.mark.parametrize("splits", (1, 3, 16))
def test_every_schedule_gives_the_same_within_rounding(tile, warps, splits):
    query, cache = problem(128, NVFP4, 4, lengths=(1000, 64, 0, 1023, 512), pages=8, page_size=128)
    out = pallas.decode_attention(query, cache, 128**-0.5, schedule=pallas.Schedule(splits, tile, warps))
    assert worst(out, query, cache, 128**-0.5) < 2


def test_the_default_on_a_gpu_is_the_kernel():
    query, cache = problem(128, NVFP4, 4)
    assert "triton" in jax.jit(lambda q, c: decode_attention(q, c, 0.1)).lower(query, cache).as_text()
    assert decode_attention(query.astype(jnp.float32), cache, 0.1).dtype == jnp.float32
