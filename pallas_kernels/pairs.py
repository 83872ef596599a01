"""Arithmetic on the two 16-bit halves of a word, written once for two machines: PTX text for a GPU, jnp for interpret mode.

A rule is a function `rule(op, word, number, constants)` from one word of values to one word of results, and may be followed by
`combine(op, words)` over the words of a group. Both call `op("name", *operands)` with words and ints. `apply` runs them, and `expand`
rules from packed codes to values:

1. In interpret mode words are uint32 arrays and an instruction is its jnp function in `INSTRUCTIONS`.
2. On a GPU the rule writes PTX, one block for all the words of a thread's octets. Triton calls a block elementwise, with eight
   elements at a time; that makes octets of them because a thread owns whole octets (`groups.octets`).

Halves are float16, bfloat16 or 16-bit integers. The float instructions round once on a GPU; a fused one rounds twice in jnp, so a
rule must not depend on the last bit of a float16 sum.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Int, Shaped, UInt8, UInt32

from pallas_kernels.arithmetic import float_bits

Word: TypeAlias = Any
"""uint32 array, or the name of a PTX register."""

Op: TypeAlias = Callable[..., Word]
Rule: TypeAlias = Callable[[Op, Word, Any, list[Word]], Word]
Combine: TypeAlias = Callable[[Op, list[Word]], list[Word]]

_OCTET = 8
_WORDS = _OCTET // 2


def apply(
    rule: Rule,
    octets: Sequence[BFloat16[Array, "n 8"]],
    constants: Sequence[Int[Array, " #n"]],
    dtype: DTypeLike,
    interpret: bool,
    combine: Combine = lambda op, words: words,
) -> Shaped[Array, "n 8"] | UInt32[Array, " n"]:
    """The results of a rule for every group: four words as bfloat16 [n, 8], two as uint8 [n, 8], or a single one as uint32 [n].

    Args:
      rule: gets the words of the octets with their number within the octet, and the constants.
      octets: eight values of every group; value 0 sits in the low half of word 0.
      constants: a word for each group, or for all of them.
      dtype: bfloat16, uint8 or uint32.
      interpret: whether the body runs in interpret mode.
      combine: from the results for all words of the octets, in order, to the words of the result.
    """
    dtype = jnp.dtype(dtype)

    def compute(op, words, names):
        return combine(op, [rule(op, word, place % _WORDS, names) for place, word in enumerate(words)])

    if not interpret:
        out = _assembled(compute, octets, constants, dtype)
        return (jnp.sum(out, axis=1) if dtype == jnp.uint32 else out).astype(dtype)
    number, columns = _emulated(constants)
    pairs = [jax.lax.bitcast_convert_type(octet.reshape(-1, _WORDS, 2), jnp.uint32) for octet in octets]
    words = [rule(_emulated_op, pair, number, columns) for pair in pairs]
    results = combine(_emulated_op, [word[:, place] for word in words for place in range(_WORDS)])
    if dtype == jnp.uint32:
        return results[0]
    return jax.lax.bitcast_convert_type(jnp.stack(results, axis=-1), dtype).reshape(-1, _OCTET)


def expand(
    rule: Rule, packed: UInt8[Array, "n 8"], place: int, constants: Sequence[Int[Array, " #n"]], interpret: bool
) -> BFloat16[Array, "n 8"]:
    """The other way: a word of eight codes to eight values.

    Args:
      rule: gets the word, the number of a pair of its codes, and the constants; returns the pair's values.
      packed: two words of every group, as bytes.
      place: 0 for the first of them, 1 for the second.
      constants: a word for each group, or for all of them.
      interpret: whether the body runs in interpret mode.
    """
    if not interpret:
        compute = lambda op, words, names: [rule(op, words[place], number, names) for number in range(_WORDS)]  # noqa: E731
        return _assembled(compute, [packed], constants, jnp.dtype(jnp.bfloat16))
    number, columns = _emulated(constants)
    word = jax.lax.bitcast_convert_type(packed.reshape(-1, 2, 4), jnp.uint32)[:, place, None]
    return jax.lax.bitcast_convert_type(rule(_emulated_op, word, number, columns), jnp.bfloat16).reshape(-1, _OCTET)


def _emulated(constants: Sequence[Int[Array, " #n"]]) -> tuple[Word, list[Word]]:
    """The numbers of all words of an octet, and the constants, in shapes that broadcast against [n, 4]."""
    return jax.lax.broadcasted_iota(jnp.uint32, (1, _WORDS), 1), [constant.astype(jnp.uint32)[:, None] for constant in constants]


def _emulated_op(name: str, *operands: Word | int) -> Word:
    result = INSTRUCTIONS[name][1](*(np.uint32(operand) if isinstance(operand, int) else operand for operand in operands))
    # Without the barrier XLA on CPU writes out every use of a result again, and takes minutes to compile.
    return jax.lax.optimization_barrier(result)


def _assembled(compute, arguments, constants, dtype) -> jax.Array:
    """`compute(op, words, names)` over all words of eight elements of the arguments, as a block of PTX; gives the words of the result."""
    shape = arguments[0].shape
    outputs, inputs = _OCTET * dtype.itemsize // 4, _OCTET * sum(array.dtype.itemsize for array in arguments) // 4
    words = [f"${outputs + number}" for number in range(inputs)]
    # A constant is the same for the eight elements and takes eight operands, of which the first is read.
    names = [f"${outputs + inputs + _OCTET * number}" for number in range(len(constants))]
    lines: list[str] = []

    def write(instruction: str, *operands: str) -> str:
        register = f"r{len(lines)}"
        lines.append(instruction.format(register, *operands))
        return register

    def op(name: str, *operands: str | int) -> str:
        # The assembler makes an immediate of a moved constant wherever the instruction has one.
        registers = [write(f"mov.b32 {{0}}, {operand:#x};") if isinstance(operand, int) else operand for operand in operands]
        return write(INSTRUCTIONS[name][0], *registers)

    results = compute(op, words, names)
    # A single word comes with seven zeros, and a sum finds it.
    results = results + ["0"] * (outputs - len(results))
    moves = [f"mov.b32 ${number}, {result};" for number, result in enumerate(results)]
    # The lowering gives results of unsigned dtypes a type that Triton does not know.
    signed = {"uint8": jnp.int8, "uint32": jnp.int32}.get(dtype.name, dtype)
    (out,) = pltriton.elementwise_inline_asm(
        "\n".join(["{", f".reg .b32 r<{len(lines)}>;", *lines, *moves, "}"]),
        args=[*arguments, *(jnp.broadcast_to(constant[:, None], shape) for constant in constants)],
        constraints=",".join(["=r"] * outputs + ["r"] * (inputs + _OCTET * len(names))),
        pack=_OCTET,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, signed)],
    )
    return out


def _half_by_half(dtype: DTypeLike, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays of a 16-bit dtype as one of words."""

    def both(*words):
        rank = max(np.ndim(word) for word in words)
        words = (word if np.ndim(word) else jax.lax.full((1,) * rank, word, jnp.uint32) for word in words)
        halves = (jax.lax.bitcast_convert_type(word, dtype) for word in words)
        return jax.lax.bitcast_convert_type(function(*halves), jnp.uint32)

    return both


def _on_floats(dtype: DTypeLike, function: Callable[..., Any]) -> Callable[..., Any]:
    """A float32 function of halves of `dtype`, its result rounded to `dtype` (out of reach of XLA's cast folding)."""
    bits = jnp.finfo(dtype)

    def rounded(*halves):
        result = function(*(half.astype(jnp.float32) for half in halves))
        return jax.lax.reduce_precision(result, exponent_bits=bits.nexp, mantissa_bits=bits.nmant).astype(dtype)

    return _half_by_half(dtype, rounded)


def _bytes(low, high, selector):
    """The four bytes of two words that the hexadecimal digits of the selector name, the last digit first."""
    chosen = [int(selector) >> 4 * place & 7 for place in range(4)]
    parts = [(((low if number < 4 else high) >> 8 * (number & 3)) & 0xFF) << 8 * place for place, number in enumerate(chosen)]
    return parts[0] | parts[1] | parts[2] | parts[3]


def _fused(a, b, c):
    """a * b + c; a zero is positive, unless all are negative, also where XLA takes an added zero away."""
    total = a * b + c
    return jnp.where((total == 0.0) & (float_bits(c) >= 0), 0.0, total)


def _lifted(half):
    magnitude = half & 0x7FFF
    normal = jax.lax.bitcast_convert_type(magnitude, jnp.bfloat16).astype(jnp.float32) * 2.0**126
    value = jnp.where(magnitude < 0x80, magnitude.astype(jnp.float32) * 2.0**-7, normal)
    return jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16) | (half & 0x8000)


def _clamped_sum(half, shift, top):
    return jnp.maximum(jnp.minimum(half + shift, top), 0)


_F16, _BF16 = jnp.float16, jnp.bfloat16

INSTRUCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "and": ("and.b32 {0}, {1}, {2};", lambda a, b: a & b),
    "or": ("or.b32 {0}, {1}, {2};", lambda a, b: a | b),
    "xor": ("xor.b32 {0}, {1}, {2};", lambda a, b: a ^ b),
    "add": ("add.u32 {0}, {1}, {2};", lambda a, b: a + b),
    "mad": ("mad.lo.u32 {0}, {1}, {2}, {3};", lambda a, b, c: a * b + c),
    "shl": ("shl.b32 {0}, {1}, {2};", lambda a, b: a << b),
    "shr": ("shr.u32 {0}, {1}, {2};", lambda a, b: a >> b),
    "mul": ("mul.lo.u32 {0}, {1}, {2};", lambda a, b: a * b),
    "bytes": ("prmt.b32 {0}, {1}, {2}, {3};", _bytes),
    "min_u16": ("min.u16x2 {0}, {1}, {2};", _half_by_half(jnp.uint16, jnp.minimum)),
    "max_u16": ("max.u16x2 {0}, {1}, {2};", _half_by_half(jnp.uint16, jnp.maximum)),
    "clamped_sum_s16": ("add.s16x2 {0}, {1}, {2}; min.relu.s16x2 {0}, {0}, {3};", _half_by_half(jnp.int16, _clamped_sum)),
    "less_f16": ("set.lt.f16x2.f16x2 {0}, {1}, {2};", _on_floats(_F16, lambda a, b: jnp.where(a < b, 1.0, 0.0))),
    "max_f16": ("max.f16x2 {0}, {1}, {2};", _on_floats(_F16, jnp.maximum)),
    "add_f16": ("add.rn.f16x2 {0}, {1}, {2};", _on_floats(_F16, lambda a, b: a + b)),
    "sub_f16": ("sub.rn.f16x2 {0}, {1}, {2};", _on_floats(_F16, lambda a, b: a - b)),
    "mul_f16": ("mul.rn.f16x2 {0}, {1}, {2};", _on_floats(_F16, lambda a, b: a * b)),
    "fma_f16": ("fma.rn.f16x2 {0}, {1}, {2}, {3};", _on_floats(_F16, _fused)),
    "fma_bf16": ("fma.rn.bf16x2 {0}, {1}, {2}, {3};", _on_floats(_BF16, _fused)),
    "lift_bf16": ("mov.b32 {0}, 0x7E807E80; mul.rn.bf16x2 {0}, {1}, {0};", _half_by_half(jnp.uint16, _lifted)),
    "reached_bf16": ("set.ge.u32.bf16x2 {0}, {1}, {2};", _half_by_half(jnp.int16, lambda a, b: -(a >= b).astype(jnp.int16))),
}
"""Name: (PTX with the result as {0}, jnp function of uint32 words).

`clamped_sum_s16` is max(min(a + b, c), 0) of signed halves whose sum must not overflow, `less_f16` gives 1.0 or 0.0,
`reached_bf16` all ones or zeros where a >= b for magnitudes, `lift_bf16` 2^126 * a for |a| < 2, subnormal ones too (GPUs multiply them
exactly, XLA on CPU does not), `bytes` takes a selector of four digits 0..7.
"""
