"""The arithmetic of the formats, shared by the jnp reference and the Pallas bodies.

Everything here is elementwise and made of integer operations on float bits, comparisons, exact products by powers of two
and one rounded product per block. There is no division, no narrow cast and no look-up table, so a compiler finds nothing
to fold or reassociate, and the same bytes come out eagerly, under jit, on CPU and on GPU.

Float32 subnormals count as zero, on the way in and on the way out. XLA on CPU flushes them anyway and a GPU does not;
making it a rule keeps both equal.

Literals are Python scalars: they adapt to the array under strict promotion and Pallas can capture them.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.formats import E4M3_MAX, E4M3_NAN, E8M0_NAN, RECIPROCAL_SIX

SIGN_BIT = -0x80000000
INFINITY_BITS = 0x7F800000
QUIET_NAN_BITS = 0x7FC00000
SMALLEST_NORMAL = 2.0**-126


def float_bits(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """The bit pattern of float32 values as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def bits_float(bits: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """The float32 values of int32 bit patterns."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@jax.custom_jvp
def flushed(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Float32 values, subnormals as the zero of their sign, as XLA on CPU has them anyway. Differentiable as the identity."""
    bits = float_bits(x)  # Pallas' Triton lowering makes +0 of jnp.copysign(0.0, x)
    return bits_float(jnp.where((bits & INFINITY_BITS) == 0, bits & SIGN_BIT, bits))


flushed.defjvp(lambda primals, tangents: (flushed(*primals), tangents[0]))


def magnitude_bits(x: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """Bits of |x| with subnormals set to zero. Ordered like the magnitudes; >= INFINITY_BITS means not finite."""
    magnitude = jnp.abs(x)
    return float_bits(jnp.where(magnitude < SMALLEST_NORMAL, 0.0, magnitude))


def multiplier_bits(amax_bits: Int[Array, "*s"], nudged: bool) -> Int[Array, "*s"]:
    """Bits of the decode multiplier 2^-n, times (1 + 2^-17) if nudged.

    n is the largest integer with amax * 2^n <= 2688 = 6 * 448; 2688 = 1.3125 * 2^11, hence the mantissa 0x280000.
    n stays in -126..126 so that 2^n and 2^-n are normal. amax of zero or not finite gives n = 0.
    """
    exponent = amax_bits >> 23
    n = 138 - exponent - jnp.where((amax_bits & 0x7FFFFF) > 0x280000, 1, 0)
    n = jnp.clip(n, -126, 126)
    n = jnp.where((amax_bits == 0) | (amax_bits >= INFINITY_BITS), 0, n)
    return ((127 - n) << 23) | (0x40 if nudged else 0)


def encode_gain(multiplier: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """2^n for a decode multiplier in [2^-n, 2^(1-n)): only its exponent counts, so nudged and plain agree."""
    exponent = (float_bits(multiplier) >> 23) & 0xFF
    return bits_float(jnp.clip(254 - exponent, 1, 253) << 23)


def e4m3_code(v: Float[Array, "*s"]) -> Int[Array, "*s"]:
    """E4M3 byte nearest to v in [0, 448], ties to even.

    The sum with a power of two whose last bit is the grid step at v rounds v; its low bits then count the grid. Below 2^-6
    the grid keeps the step of 2^-9.
    """
    exponent = jnp.maximum(float_bits(v) & 0x7F800000, 121 << 23)
    return (float_bits(v + bits_float(exponent + (20 << 23))) + (exponent >> 20) - (121 << 3)) & 0x7F


def e4m3_value(code: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Value of a scale byte; bytes outside 0x00..0x7E are no scales and give NaN."""
    normal = bits_float((code << 20) + (120 << 23))
    value = jnp.where(code < 8, code.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(code > 0x7E, jnp.nan, value)


def e2m1_magnitude(index: Int[Array, "*s"]) -> Float[Array, "*s"]:
    """Magnitude of the codes 0..7: index 1 is the subnormal .5, the rest has one exponent step every two codes."""
    normal = bits_float((index << 22) + (126 << 23))
    return jnp.where(index < 2, index.astype(jnp.float32) * 0.5, normal)


def scale_code(amax_bits: Int[Array, "*s"], gain: Float[Array, "*#s"] | None) -> Int[Array, "*s"]:
    """Scale byte of blocks with the given magnitude: E4M3 under gain = 2^n, E8M0 if gain is None (no multiplier).

    A block that is not finite gets the NaN byte.
    """
    if gain is not None:
        # amax * 2^n is exact, so this is fl(amax * R) * 2^n with its one rounding, safe from subnormal products.
        code = e4m3_code(jnp.minimum((bits_float(amax_bits) * gain) * RECIPROCAL_SIX, E4M3_MAX))
        return jnp.where(amax_bits >= INFINITY_BITS, E4M3_NAN, code)
    # The EVEN rule: the power of two of amax rounded up from mantissa 1.75, over 4 (the exponent of 6).
    code = jnp.clip(((amax_bits + (1 << 21)) >> 23) - 2, 0, 254)
    return jnp.where(amax_bits >= INFINITY_BITS, E8M0_NAN, code)


def encode_terms(code: Int[Array, "*s"], gain: Float[Array, "*#s"] | None) -> tuple[Float[Array, "*#s"], Float[Array, "*s"]]:
    """(gain, step) of a block: the magnitude v of the format stands for the input |x| with |x| * gain = v * step.

    E4M3 bytes come with their gain, E8M0 bytes with None and make it.
    """
    if gain is not None:
        return gain, e4m3_value(code)
    # 2^(127 - byte); byte 254 would need a subnormal, so it takes twice the gain and twice the step.
    gain = bits_float((254 - jnp.minimum(code, 253)) << 23)
    step = jnp.where(code == 254, 2.0, jnp.ones_like(gain))
    return gain, jnp.where(code == E8M0_NAN, jnp.nan, step)


def encode_block(
    amax_bits: Int[Array, "*s"], multiplier: Float[Array, "*#s"] | None
) -> tuple[Int[Array, "*s"], Float[Array, "*#s"], Float[Array, "*s"]]:
    """(scale byte, gain, step) of blocks with the given magnitude under their decode multiplier; None for E8M0."""
    gain = None if multiplier is None else encode_gain(multiplier)
    scales = scale_code(amax_bits, gain)
    return scales, *encode_terms(scales, gain)


def decode_terms(code: Int[Array, "*s"], multiplier: Float[Array, "*#s"] | None) -> tuple[Float[Array, "*s"], Float[Array, "*s"] | None]:
    """(factor, pre) of a block: the magnitude v decodes to (v * pre) * factor; pre None stands for one.

    E4M3 bytes come with their multiplier, E8M0 bytes with None.
    """
    if multiplier is not None:
        factor = e4m3_value(code) * multiplier
        return jnp.where(factor < SMALLEST_NORMAL, 0.0, factor), None
    factor = bits_float(jnp.maximum(code, 1) << 23)
    pre = jnp.where(code == 0, 0.5, jnp.ones_like(factor))
    return jnp.where(code == E8M0_NAN, jnp.nan, factor), pre


def signed_value(
    magnitude: Float[Array, "*s"], sign_bits: Int[Array, "*s"], factor: Float[Array, "*#s"], pre: Float[Array, "*#s"] | None
) -> Float[Array, "*s"]:
    """RN_bf16(magnitude * factor) with the sign, as float32; never -0. Rounded on the bits: no cast pair to fold."""
    scaled = magnitude if pre is None else magnitude * pre
    # The limit makes every NaN the plain one: a GPU's own, 0x7FFFFFFF, would overflow in the rounding and come out finite.
    bits = jnp.minimum(float_bits(scaled * factor) & 0x7FFFFFFF, QUIET_NAN_BITS)
    bits = round_bits_to_bf16(jnp.where(bits < 0x00800000, 0, bits))
    return bits_float(jnp.where(bits == 0, 0, bits | (sign_bits & SIGN_BIT)))


def stored_value(
    magnitude: Float[Array, "*s"],
    sign_bits: Int[Array, "*s"],
    factor: Float[Array, "*#s"],
    pre: Float[Array, "*#s"] | None,
    dtype: DTypeLike,
) -> Float[Array, "*s"]:
    """`signed_value` in the dtype, for kernels that write it to memory: a cast to bfloat16 that nothing reads back is not
    folded, so it may do the rounding."""
    if dtype != jnp.bfloat16:
        return signed_value(magnitude, sign_bits, factor, pre).astype(dtype)
    product = (magnitude if pre is None else magnitude * pre) * factor
    signed = bits_float(float_bits(product) | (sign_bits & SIGN_BIT))
    return jnp.where(product < SMALLEST_NORMAL, 0.0, signed).astype(dtype)


def nearest_bf16(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Float32 values rounded to the nearest bfloat16 value, as float32. Subnormals are rounded, infinities kept, NaN stays NaN."""
    bits = float_bits(x)
    # The carry of a NaN's low bits could reach the sign, so NaN gets its quiet bit and loses the rest first.
    is_nan = (bits & 0x7FFFFFFF) > INFINITY_BITS
    return bits_float(jnp.where(is_nan, (bits | 0x400000) & -0x10000, round_bits_to_bf16(bits)))


def round_bits_to_bf16(bits: Int[Array, "*s"]) -> Int[Array, "*s"]:
    """Float32 bits rounded to eight significant bits, ties to even. Infinity stays, and so does NaN if its low bits are zero."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
