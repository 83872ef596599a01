"""`guided_fake_quant`: the shared tests for each implementation, and what it refuses."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import MXFP4, NVFP4, Guide, guided_fake_quant, mantissa_bits, quantize
from tests.pallas_kernels.base_guided import GuidedBase, record
from tests.pallas_kernels.cases import normal


class TestReference(GuidedBase):
    implementation = "reference"


class TestPallasInterpreted(GuidedBase):
    implementation = "pallas"


X = jnp.zeros((4, 48), jnp.float32)
GUIDE = Guide("mantissa", jnp.zeros((4, 6), jnp.uint8), jnp.zeros((4, 3), jnp.uint8), None, jnp.ones(4, bool))


@pytest.mark.parametrize(
    ("change", "fmt", "multiplier", "message"),
    [
        ({"kind": "bits"}, NVFP4, 1.0, "scales, mantissa, codes"),
        ({"data": None}, NVFP4, 1.0, "guide data"),
        ({"kind": "codes"}, NVFP4, 1.0, r"\(4, 24\)"),
        ({"scales": jnp.zeros((4, 2), jnp.uint8)}, NVFP4, 1.0, "guide scales"),
        ({"scales": jnp.zeros((4, 2), jnp.uint8), "multiplier": jnp.float32(1)}, MXFP4, None, "no multiplier"),
        ({}, NVFP4, None, "multiplier of the rollout"),
        ({"multiplier": jnp.ones(3)}, NVFP4, 1.0, "broadcast"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_records_are_explained(change, fmt, multiplier, message):
    with pytest.raises(ValueError, match=message):
        guided_fake_quant(X, dataclasses.replace(GUIDE, **change), fmt, multiplier)


@pytest.mark.parametrize("size", (2048, 200))
def test_t4_bytes_of_a_record(size):
    """Per token and site: d/8 bits or d/2 codes, and one scale byte for each block."""
    q = quantize(jnp.asarray(normal((3, size), 1)), NVFP4)
    bits = mantissa_bits(q.codes, size)
    blocks = -(-size // 16)
    assert bits.nbytes + q.scales.nbytes == 3 * (-(-size // 8) + blocks)
    assert q.codes.nbytes + q.scales.nbytes == 3 * (-(-size // 2) + blocks)


def test_guide_multiplier_defaults_to_the_trainers():
    x = jnp.asarray(normal((4, 48), 2))
    q = quantize(x, NVFP4, np.float32(0.25))
    implied = guided_fake_quant(x, record(q, "codes"), NVFP4, np.float32(0.25))
    stated = guided_fake_quant(x, record(q, "codes", multiplier=jnp.float32(0.25)), NVFP4, None)
    np.testing.assert_array_equal(np.asarray(implied.astype(jnp.float32)), np.asarray(stated.astype(jnp.float32)))
