"""The PTX of `packed_tile`, run by a few lines of NumPy, computes what interpret mode computes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import packed_tile
from tests.pallas_kernels.cases import BF16, FORMATS, random_bytes


def lop3(a, b, c, table):
    out = np.zeros_like(a)
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out


def halves(function):
    """A bfloat16 operation on both halves of a register, subnormals kept."""

    def apply(a, b):
        a, b = (np.ascontiguousarray(each).view(BF16).astype(np.float64) for each in (a, b))
        with np.errstate(over="ignore", invalid="ignore"):
            return function(a, b).astype(BF16).view(np.uint32)

    return apply


OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lambda a, b, c, table: lop3(a, b, c, int(table.flat[0])),
    "mul.rn.bf16x2": halves(np.multiply),
    "min.bf16x2": halves(np.minimum),
}


def run(asm, arguments, dtype):
    """Executes the text on pairs of 16-bit elements."""
    shape = arguments[0].shape
    registers = {f"${n + 1}": np.asarray(each).view(np.uint16).reshape(-1).view(np.uint32) for n, each in enumerate(arguments)}

    def read(name):
        return registers[name] if name in registers else np.full_like(registers["$1"], int(name, 0))

    for line in filter(None, (part.strip() for part in asm.split(";"))):
        operation, operands = line.split(" ", 1)
        target, *sources = (each.strip() for each in operands.split(","))
        registers[target] = OPERATIONS[operation](*map(read, sources))
    return jnp.asarray(registers["$0"].view(np.uint16).view(dtype).reshape(shape))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("half", (0, 1))
def test_every_word_and_every_scale(monkeypatch, fmt, half):
    """Every 16-bit word of codes under one scale, and every scale byte, valid or not, under random codes."""
    monkeypatch.setattr(packed_tile, "_inline", run)
    every = np.arange(65536, dtype=np.uint16).reshape(4096, 16)
    one = np.full((4096, 2), 0x3C3C if fmt.scale == "e4m3" else 0x8181, np.uint16)
    bytes_ = np.arange(256, dtype=np.uint16)
    scales = np.stack([bytes_ << 8 | bytes_[::-1], bytes_ | bytes_ << 8], axis=1)
    random = random_bytes((256, 32), 1).view(np.uint16)
    for words, pairs, whole in ((every, one, False), (random, scales, False), (random, scales, True)):
        arguments = jnp.asarray(words), jnp.asarray(pairs), half, fmt
        for ours, twin in zip(
            packed_tile.decode_tile(*arguments, False, whole), packed_tile.decode_tile(*arguments, True, whole), strict=True
        ):
            ours, twin = np.asarray(ours).astype(np.float64), np.asarray(twin).astype(np.float64)
            assert np.isfinite(ours).all() and np.isfinite(twin).all()
            # Bytes that are no scales may count as different ones; what XLA on CPU flushes is below 2^-126.
            byte = np.repeat(pairs >> 8 * half & 0xFF, 16 // (2 if not whole else 4), axis=1)
            byte = np.tile(byte, (1, 2)) if whole else byte
            known = byte < 0x7F if fmt.scale == "e4m3" else byte < 0xFF
            difference = np.where(known & (np.abs(ours) >= 2.0**-126), ours - twin, 0.0)
            assert not difference.any()
            assert np.abs(np.where(known, ours - twin, 0.0)).max() < 2.0**-124


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_invalid_scales(monkeypatch, fmt):
    words = np.arange(65536, dtype=np.uint16).reshape(4096, 16)
    bad = (lambda byte: byte > 0x7E) if fmt.scale == "e4m3" else (lambda byte: byte == 0xFF)
    expected = (np.where(bad(words & 0xFF), 0x80, 0) | np.where(bad(words >> 8), 0x8000, 0)).astype(np.uint16)
    twin = packed_tile.invalid_scales(jnp.asarray(words), fmt, True)
    monkeypatch.setattr(packed_tile, "_inline", run)
    for found in (twin, packed_tile.invalid_scales(jnp.asarray(words), fmt, False)):
        np.testing.assert_array_equal(np.asarray(found).view(np.uint16), expected)
