"""The guided rounding rule, elementwise, shared by the jnp reference and the Pallas body.

1. Scale |x| by the rollout's 2^n and take the two codes around it under the rollout's block scale. A clipped value has the
   bracket {4, 6}.
2. On a code exactly: keep it.
3. Else choose by the record: "mantissa" the code whose low bit is the recorded one, "codes" the code nearest to the
   recorded one, "scales" the nearest code, as the quantizer would.
4. Rows without a record use their own scale and multiplier and the nearest code.
5. A block with a value that is not finite becomes NaN.

Source: TRACE, arXiv 2610.07767, algorithm 1; the exact form in docs/numerics.md.
"""

from types import ModuleType

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arithmetic import (
    INFINITY_BITS,
    bits_float,
    decode_terms,
    encode_gain,
    encode_terms,
    float_bits,
    magnitude_bits,
    scale_code,
)
from pallas_kernels.formats import BlockFormat


def guided_terms(
    x: Float[Array, "*rows block"],
    amax_bits: Int[Array, "*rows 1"],
    record: Int[Array, "*rows block"] | None,
    rollout_scales: Int[Array, "*rows 1"],
    valid: Bool[Array, "*#rows 1"] | Bool[Array, ""],
    multiplier: Float[Array, "*#rows 1"] | Float[Array, ""] | None,
    rollout_multiplier: Float[Array, "*#rows 1"] | Float[Array, ""] | None,
    kind: str,
    fmt: BlockFormat,
    rounding: ModuleType,
) -> tuple[Float[Array, "*rows block"], Float[Array, "*rows 1"], Float[Array, "*rows 1"] | None]:
    """(magnitude, factor, pre) of guided rounding, for `signed_value` or `stored_value`; every argument broadcasts against x.

    `rounding` is `ladder`, or `reciprocal` for bfloat16 values.
    """
    own_gain = None if multiplier is None else encode_gain(multiplier)
    own_scales = scale_code(amax_bits, own_gain)
    scales = jnp.where(valid, rollout_scales, own_scales)
    if multiplier is not None and rollout_multiplier is not None:
        multiplier = jnp.where(valid, rollout_multiplier, multiplier)
    gain, step = encode_terms(scales, None if multiplier is None else encode_gain(multiplier))

    a = bits_float(magnitude_bits(x)) * gain
    if record is None:
        value = rounding.nearest_value(a, step, fmt)
    else:
        bit = record if kind == "mantissa" else _low_bit(x, rounding.lower_index(a, step, fmt), record)
        value = rounding.value_with_low_bit(a, step, bit, valid, fmt)
    factor, pre = decode_terms(scales, multiplier)
    # The rollout's scale cannot tell that x is not finite, so the block says so itself.
    factor = jnp.where(amax_bits >= INFINITY_BITS, jnp.nan, factor)
    return value, factor, pre


def _low_bit(
    x: Float[Array, "*rows block"], lower: Int[Array, "*rows block"], record: Int[Array, "*rows block"]
) -> Int[Array, "*rows block"]:
    """Low bit of whichever of the codes `lower` and `lower + 1` is nearer to the recorded code.

    In the sign frame of x the upper one is nearer exactly if the recorded index lies above the lower one: no midpoint of two
    adjacent codes is a code, so there are no ties, and -0 counts as 0.
    """
    same_sign = (float_bits(x) < 0) == (record >= 8)
    return jnp.where(same_sign & ((record & 7) > lower), lower + 1, lower) & 1
