"""Codes and scale bytes to bfloat16 operands, inside the kernel.

On a GPU two neighbouring columns are decoded at once: a code lies on sign and low exponent bits of a bfloat16, so it is the
value times 2^-126, subnormals included, and one product with the scale times 2^112 gives the weight times 2^-14, exactly (a code has
two significant bits, a scale four). That is five instructions for two weights; no other form comes close, and Triton finds
none of it by itself, hence the assembly. In interpret mode jnp computes the weight itself.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.arithmetic import bits_float, e2m1_magnitude, e4m3_value
from pallas_kernels.formats import BlockFormat

GPU_FACTOR = {"e4m3": 2.0**14, "e8m0": 1.0}
"""What the sum of products is short of on a GPU."""

_FIELDS = "and.b32 t, t, 0x81C081C0;"
_SHIFTS = (
    _FIELDS,
    f"shl.b32 t, t, 3; {_FIELDS}",
    f"shl.b32 t, t, 6; {_FIELDS}",
    "shr.b32 u, t, 4; and.b32 u, u, 0x00C000C0; shr.b32 v, t, 5; lop3.b32 u, v, 0x01000100, u, 0xEA;"
    " shl.b32 v, t, 1; lop3.b32 t, v, 0x80008000, u, 0xEA;",
)
"""Places 0..3 of 16 bits to sign and low exponent bits; 0xEA is (a & b) | c."""

_SCALES = {
    # An E4M3 byte shifted by 4 is a bfloat16 of the value times 2^-120; then 2^120 and 2^112.
    "e4m3": "shl.b32 t, t, 4; mov.b32 u, 0x7B807B80; mov.b32 v, 0x77807780; mul.bf16x2 t, t, u; mul.bf16x2 $0, t, v;",
    # An E8M0 byte is the exponent of a bfloat16. Byte 0 gives zero: its values lie below 2^-124.
    "e8m0": "shl.b32 $0, t, 7;",
}
_PRODUCT = {
    "e4m3": "mul.bf16x2 $0, t, $3;",
    "e8m0": "mov.b32 u, 0x7E807E80; mul.bf16x2 t, t, u; mul.bf16x2 $0, t, $3;",
}


def scale_operand(scales: UInt8[Array, "n c"], fmt: BlockFormat, interpret: bool) -> Float[Array, "n c"]:
    """The scales as bfloat16 for `weight_operand`."""
    codes = scales.astype(jnp.int32)
    if interpret:
        value = e4m3_value(codes) if fmt.scale == "e4m3" else bits_float(codes << 23)
        return value.astype(jnp.bfloat16)
    return _pairs(f"prmt.b32 t, $1, $2, 0x5410; {_SCALES[fmt.scale]}", "=r,r,r", codes)


def weight_operand(
    words: Int[Array, "n c"], scales: Float[Array, "n c"], place: int, fmt: BlockFormat, interpret: bool
) -> Float[Array, "n c"]:
    """The weights at place 0..7 of the words, in bfloat16, up to `GPU_FACTOR`."""
    half, quarter = divmod(place, 4)
    if interpret:
        code = lane_code(words >> (16 * half), quarter)
        magnitude = e2m1_magnitude(code & 7) * scales.astype(jnp.float32)
        return jnp.where(code >= 8, -magnitude, magnitude).astype(jnp.bfloat16)
    pick = "0x7632" if half else "0x5410"
    return _pairs(f"prmt.b32 t, $1, $2, {pick}; {_SHIFTS[quarter]} {_PRODUCT[fmt.scale]}", "=r,r,r,r", words, scales)


def lane_code(lane: Int[Array, "*s"], quarter: int) -> Int[Array, "*s"]:
    """The code at place 0..3 of the low 16 bits."""
    if quarter < 3:
        return ((lane >> (12 - 3 * quarter)) & 8) | ((lane >> (6 - 3 * quarter)) & 7)
    return ((lane >> 11) & 8) | ((lane >> 11) & 4) | ((lane >> 10) & 3)


def _pairs(asm: str, constraints: str, *arguments: Array) -> Float[Array, "n c"]:
    """One piece of assembly for every two neighbouring elements, with the registers t, u and v."""
    (result,) = pltriton.elementwise_inline_asm(
        "{ .reg .b32 t, u, v; " + asm + " }",
        args=list(arguments),
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arguments[0].shape, jnp.bfloat16)],
    )
    return result
