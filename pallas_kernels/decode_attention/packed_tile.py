"""Packed codes and scales to bfloat16, inside a Pallas body.

On a GPU two 16-bit words (eight codes, or four scales) sit in a register and PTX handles both at once; interpret mode computes the same
values in jnp. Everything here is elementwise or a broadcast, so that Triton can move it behind the load of the matrix operands: the
packed words go to the register layout of the tensor cores, and only there become bfloat16.

The three magnitude bits of a code, put at the lowest exponent bits of a bfloat16, read as the code's value times 2^-126, the subnormal
code 1 included; a multiplication then brings the block scale in. GPUs multiply bfloat16 subnormals exactly, XLA on CPU does not.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, BFloat16, Int16, UInt16

from pallas_kernels.arithmetic import bits_float, e2m1_magnitude, e4m3_value
from pallas_kernels.formats import E4M3_MAX, BlockFormat

_TAKE_SIGN = "lop3.b32 x, x, y, 0x80008000, 0xE4;"  # the sign bits of x, all other bits of y
_PLACE_CODE = (
    # Nibbles 0 and 1: one multiplication moves the code to two places at once, sign at 15 and magnitude at 8..6.
    "and.b32 x, $1, 0x000F000F; mul.lo.u32 x, x, 0x1040;",
    "and.b32 x, $1, 0x00F000F0; mul.lo.u32 x, x, 0x0104;",
    f"shl.b32 x, $1, 4; shr.u32 y, $1, 2; {_TAKE_SIGN}",
    f"mov.b32 x, $1; shr.u32 y, $1, 6; {_TAKE_SIGN}",
)
# The low or high byte of each word at the exponent of a bfloat16: it reads as an E4M3 scale times 2^-120, or as an E8M0 scale.
_PLACE_E4M3 = ("and.b32 x, $1, 0x007F007F; shl.b32 x, x, 4;", "shr.u32 x, $1, 4; and.b32 x, x, 0x07F007F0;")
_PLACE_E8M0 = ("and.b32 x, $1, 0x00FF00FF; shl.b32 x, x, 7;", "shr.u32 x, $1, 1; and.b32 x, x, 0x7F807F80;")


def value_exponent(fmt: BlockFormat) -> int:
    """n for tiles that hold 2^-n of the values: a factor of 2^126 does not fit bfloat16 beside an E4M3 scale, 2^119 does."""
    return 7 if fmt.scale == "e4m3" else 0


def decode_tile(
    words: UInt16[Array, "T words"], scales: UInt16[Array, "T pairs"], half: int, fmt: BlockFormat, interpret: bool, whole: bool = False
) -> list[BFloat16[Array, "T words"]]:
    """Code times block scale times 2^-value_exponent, exact: the codes 4i + j of each row in column i of the j-th result.

    Whatever the bytes, the result is finite, so that slots without a token cannot spoil a product with weight zero: bytes that are
    no scales (`invalid_scales` finds them) count as some scale, and E8M0 scales above 2^125 as 2^125.

    Args:
      words: codes of half a head, or of all of it.
      scales: scale words of the head.
      half: 0 for the low bytes of the scale words, 1 for the high ones.
      fmt: the format.
      interpret: compute in jnp.
      whole: words are those of the whole head, of which the other half gets a wrong scale.
    """
    rows, columns = words.shape
    pairs, repeats = scales.shape[1], 2 if whole else 1
    factor = (_factor_in_jnp if interpret else _factor_in_ptx)(scales, half, fmt)
    factor = jnp.broadcast_to(factor[:, None, :, None], (rows, repeats, pairs, columns // pairs // repeats)).reshape(rows, columns)
    decode = _decode_in_jnp if interpret else _decode_in_ptx
    return [decode(words, factor, nibble, fmt) for nibble in range(4)]


def invalid_scales(scales: UInt16[Array, "T pairs"], fmt: BlockFormat, interpret: bool) -> Int16[Array, "T pairs"]:
    """The top bit of each byte is set where it is no scale; the other bits are zero."""
    e4m3 = fmt.scale == "e4m3"
    if interpret:
        word = scales.astype(jnp.int32)
        low, high = (jnp.where(byte > 0x7E if e4m3 else byte == 0xFF, 0x80, 0) for byte in (word & 0xFF, word >> 8))
        return (low | high << 8).astype(jnp.int16)
    # The low seven bits of a byte carry into its top bit if they are all ones.
    asm = f"and.b32 x, $1, 0x7F7F7F7F; add.u32 x, x, 0x01010101; {'or' if e4m3 else 'and'}.b32 x, x, $1; and.b32 $0, x, 0x80808080;"
    return _inline(asm, [scales], jnp.int16)


def _factor_in_ptx(scales: UInt16[Array, "T pairs"], half: int, fmt: BlockFormat) -> BFloat16[Array, "T pairs"]:
    if fmt.scale == "e4m3":
        # 2^120 makes the scale itself, 2^119 what `value_exponent` leaves of a code's 2^126.
        asm = f"{_PLACE_E4M3[half]} mov.b32 y, 0x7B807B80; mul.rn.bf16x2 x, x, y; mov.b32 y, 0x7B007B00; mul.rn.bf16x2 $0, x, y;"
    else:
        asm = f"{_PLACE_E8M0[half]} mov.b32 y, 0x7E007E00; min.bf16x2 $0, x, y;"
    return _inline(asm, [scales], jnp.bfloat16)


def _decode_in_ptx(
    words: UInt16[Array, "T words"], factor: BFloat16[Array, "T words"], nibble: int, fmt: BlockFormat
) -> BFloat16[Array, "T words"]:
    # A scale that is any power of two leaves no room for 2^126 beside it, so MXFP4 multiplies twice.
    lift = "" if fmt.scale == "e4m3" else "mov.b32 y, 0x7E807E80; mul.rn.bf16x2 x, x, y;"
    return _inline(f"{_PLACE_CODE[nibble]} and.b32 x, x, 0x81C081C0; {lift} mul.rn.bf16x2 $0, x, $2;", [words, factor], jnp.bfloat16)


def _inline(asm: str, arguments: list[jax.Array], dtype) -> jax.Array:
    (out,) = pltriton.elementwise_inline_asm(
        "{ .reg .b32 x, y; " + asm + " }",
        args=arguments,
        constraints=",".join(["=r", *["r"] * len(arguments)]),
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, dtype)],
    )
    return out


def _factor_in_jnp(scales: UInt16[Array, "T pairs"], half: int, fmt: BlockFormat) -> BFloat16[Array, "T pairs"]:
    byte = scales.astype(jnp.int32) >> 8 * half & 0xFF
    if fmt.scale == "e4m3":
        value = jnp.where(byte > 0x7E, E4M3_MAX, e4m3_value(byte)) * 2.0 ** -value_exponent(fmt)
    else:
        value = bits_float(jnp.minimum(byte, 125 + 127) << 23)
    return value.astype(jnp.bfloat16)


def _decode_in_jnp(
    words: UInt16[Array, "T words"], factor: BFloat16[Array, "T words"], nibble: int, fmt: BlockFormat
) -> BFloat16[Array, "T words"]:
    code = words.astype(jnp.int32) >> 4 * nibble & 15
    magnitude = e2m1_magnitude(code & 7)
    return jnp.where(code > 7, -magnitude, magnitude).astype(jnp.bfloat16) * factor
