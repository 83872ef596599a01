"""P4: the float32 quantizers of other projects give our bytes, fed with our multiplier, on bfloat16 data.

The formulas are written out here in NumPy, each with its own order of operations, and with one unit in the last place
added to or taken from every reciprocal, which covers approximate reciprocal instructions.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import NVFP4, decode_multiplier, quantize, unpack_codes
from tests.pallas_kernels.cases import BF16, mismatches

F = np.float32
E4M3 = ml_dtypes.float8_e4m3fn


def reciprocal(value, ulps: int):
    """1 / value, moved by whole units in the last place."""
    value = np.asarray(F(1) / np.asarray(value, F))
    return (value.view(np.int32) + np.int32(ulps)).view(F)


def e4m3(value) -> np.ndarray:
    return np.clip(value, F(0), F(448)).astype(E4M3)


def e2m1(y) -> np.ndarray:
    code = np.clip(y, F(-6), F(6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return np.where(code == 8, 0, code).astype(np.uint8)


def vllm(x, amax, ws2, ulps=(0, 0, 0)):
    gs = reciprocal(ws2, 0)
    s = e4m3(gs * (amax * reciprocal(6, ulps[0])))
    return s, e2m1(x * reciprocal(s.astype(F) * reciprocal(gs, ulps[1]), ulps[2])[..., None])


def vllm_emulation(x, amax, ws2):
    gs = reciprocal(ws2, 0)
    s = e4m3(gs * (amax * reciprocal(6, 0)))
    return s, e2m1(x * (gs / s.astype(F))[..., None])


def transformer_engine(x, amax, ws2):
    gs = reciprocal(ws2, 0)
    s = e4m3(amax * (gs * reciprocal(6, 0)))
    return s, e2m1(x * (F(1) / (s.astype(F) * (F(1) / gs)))[..., None])


def torchao(x, amax, ws2):
    s = np.clip((amax / F(6)) / ws2, F(2.0**-6), F(448)).astype(E4M3)
    return s, e2m1(x * ((F(1) / ws2) / s.astype(F))[..., None])


def modelopt(x, amax, ws2):
    s = np.clip(amax / (F(6) * ws2), F(2.0**-9), F(448)).astype(E4M3)
    return s, e2m1(x / (s.astype(F) * ws2)[..., None])


def four_over_six_static(x, amax, ws2):
    gs = reciprocal(ws2, 0)
    s = e4m3((amax / F(6)) * gs)
    return s, e2m1(x * (F(1) / (s.astype(F) * (F(1) / gs)))[..., None])


RECIPES = {f.__name__: f for f in (vllm, vllm_emulation, transformer_engine, torchao, modelopt, four_over_six_static)}
RECIPES |= {
    f"vllm{ulps}": lambda x, amax, ws2, ulps=ulps: vllm(x, amax, ws2, ulps) for ulps in itertools.product((-1, 0, 1), repeat=3) if any(ulps)
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_p4_bytes_are_ours(recipe):
    for seed, spread in ((1, 1.0), (2, 0.25), (3, 2.0**-7)):
        rng = np.random.default_rng(seed)
        x = (rng.normal(size=(256, 256)) * spread).astype(BF16).astype(F).reshape(-1, 16)
        amax = np.abs(x).max(-1)
        ws2 = np.asarray(decode_multiplier(jnp.asarray(amax.max())))
        ours = quantize(jnp.asarray(x), NVFP4, ws2)
        scales, codes = RECIPES[recipe](x, amax, ws2)
        assert mismatches(ours.scales[:, 0], scales.view(np.uint8)) == 0
        assert mismatches(unpack_codes(ours.codes, 16), codes) == 0


def test_without_the_nudge_the_recipes_would_differ():
    """The control: under the plain power of two ties exist, and round-to-even quantizers part from the strict ladder."""
    x = np.random.default_rng(1).normal(size=(4096, 16)).astype(BF16).astype(F)
    amax = np.abs(x).max(-1)
    ws2 = np.asarray(decode_multiplier(jnp.asarray(amax.max()), nudged=False))
    _, codes = vllm(x, amax, ws2)
    assert mismatches(unpack_codes(quantize(jnp.asarray(x), NVFP4, ws2).codes, 16), codes) > 50
