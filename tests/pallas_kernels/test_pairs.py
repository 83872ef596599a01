"""The instructions of the pairwise rules in jnp against NumPy; that PTX does the same only a GPU can show (`test_gpu`)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pairs import INSTRUCTIONS, apply, expand
from tests.pallas_kernels.cases import BF16

HALVES = np.random.default_rng(0).integers(0, 2**16, size=(3, 4096, 2), dtype=np.uint16)


def result(name: str, *halves: np.ndarray) -> np.ndarray:
    words = (jnp.asarray(half.view(np.uint32)[:, 0]) for half in halves)
    return np.asarray(INSTRUCTIONS[name][1](*words)).view(np.uint16).reshape(-1, 2)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("less_f16", lambda a, b: (a < b).astype(np.float16)),
        ("max_f16", np.maximum),
        ("add_f16", np.add),
        ("sub_f16", np.subtract),
        ("mul_f16", np.multiply),
        ("fma_f16", lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float16)),
    ],
)
def test_float16_instructions_round_once_to_float16(name, function):
    # Exponents from 2^-3 to 2^4 in both signs: the results are normal numbers or zero, and need rounding.
    a, b, c = ((HALVES & 0x83FF) + (12 << 10) + (HALVES & 0x1C00)).view(np.float16)
    operands = (a, b, c) if name == "fma_f16" else (a, b)
    np.testing.assert_array_equal(result(name, *operands).view(np.float16), function(*operands))


def test_integer_instructions_keep_the_halves_apart():
    a, b, c = HALVES
    np.testing.assert_array_equal(result("min_u16", a, b), np.minimum(a, b))
    np.testing.assert_array_equal(result("max_u16", a, b), np.maximum(a, b))
    magnitude, shift, top = (a & 0x7FFF).view(np.int16), (b | 0x8000).view(np.int16), (c & 0x7FFF).view(np.int16)
    total = np.clip(magnitude.astype(np.int32) + shift, None, top).clip(0)
    np.testing.assert_array_equal(result("clamped_sum_s16", magnitude, shift, top), total)
    np.testing.assert_array_equal(result("reached_bf16", magnitude, top), np.where(magnitude >= top, 0xFFFF, 0))


def test_a_zero_of_the_bfloat16_product_is_positive():
    zeros = np.array([[0x0000, 0x8000]], np.uint16)
    factor = np.full((1, 2), 0x3F80, np.uint16)
    assert result("fma_bf16", zeros, factor, np.zeros((1, 2), np.uint16)).tolist() == [[0, 0]]


def test_lifting_is_exact_for_subnormals():
    halves = np.arange(2**16, dtype=np.uint16).reshape(-1, 2)
    some = halves[((halves & 0x7FFF) < 0x4000).all(axis=1)]  # less than 2
    lifted = result("lift_bf16", some).view(BF16).astype(np.float64)
    np.testing.assert_array_equal(lifted, some.view(BF16).astype(np.float64) * 2.0**126)


def test_codes_reach_the_rule_a_word_at_a_time():
    packed = jnp.asarray(np.arange(16, dtype=np.uint8).reshape(2, 8))
    constants = [jnp.asarray([0x10000, 0x20000], jnp.int32)]

    def rule(op, word, number, constants):
        return op("add", op("shr", word, 8 * number), op("mul", constants[0], number))

    words = np.arange(16, dtype=np.uint8).view(np.uint32).reshape(2, 2)
    for place in range(2):
        out = np.asarray(expand(rule, packed, place, constants, True)).view(np.uint32)
        added = np.array([[0x10000], [0x20000]], np.uint32) * np.arange(4, dtype=np.uint32)
        np.testing.assert_array_equal(out, (words[:, place, None] >> 8 * np.arange(4, dtype=np.uint32)) + added)


def test_bytes_are_named_by_digits():
    low, high = np.uint32(0x33221100), np.uint32(0x77665544)
    assert int(INSTRUCTIONS["bytes"][1](low, high, np.uint32(0x6420))) == 0x66442200


def test_words_and_constants_reach_the_rule_in_order():
    values = jnp.arange(16, dtype=jnp.float32).astype(jnp.bfloat16).reshape(2, 8)
    constants = [jnp.asarray([1, 2], jnp.int32)]

    def rule(op, word, number, constants):
        return op("add", op("add", word, constants[0]), number)

    out = np.asarray(apply(rule, [values], constants, jnp.bfloat16, True)).view(np.uint16).reshape(2, 4, 2)
    expected = np.asarray(values).view(np.uint16).reshape(2, 4, 2).copy()
    expected[..., 0] += np.arange(4, dtype=np.uint16) + np.array([[1], [2]], np.uint16)
    np.testing.assert_array_equal(out, expected)
