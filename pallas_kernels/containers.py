"""The two array bundles of the API: a quantized tensor and a guidance record slice. Both are pytrees, of jax or NumPy arrays."""

import dataclasses
from typing import Any

from jaxtyping import Bool, Float, UInt8

from pallas_kernels.formats import BlockFormat
from pallas_kernels.pytrees import register_arrays

GUIDE_KINDS = ("scales", "mantissa", "codes")


@register_arrays
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A tensor in a block format, quantized along its last axis.

    Args:
      codes: uint8[..., ceil(d/2)], two E2M1 codes a byte, low nibble first; never -0.
      scales: uint8[..., ceil(d/block)], E4M3 or E8M0 bytes. 0x7F (E4M3) or 0xFF (E8M0) marks a block that held a value
        that was not finite.
      multiplier: float32 decode multiplier, scalar or with one axis for every leading axis; None for MXFP4.
      size: d, the length of the last axis of the tensor.
      fmt: the format.
    """

    codes: UInt8[Any, "*rows bytes"]
    scales: UInt8[Any, "*rows blocks"]
    multiplier: Float[Any, "*#rows"] | None
    size: int = dataclasses.field(metadata={"static": True})
    fmt: BlockFormat = dataclasses.field(metadata={"static": True})


@register_arrays
@dataclasses.dataclass(frozen=True)
class Guide:
    """What the rollout engine recorded about its rounding of one tensor; rows are the leading axes of that tensor.

    Args:
      kind: "scales" (only the scale is known), "mantissa" (also the low bit of each code) or "codes" (the whole codes).
      data: None | uint8[..., ceil(d/8)] bits, least significant first | uint8[..., ceil(d/2)] packed codes.
      scales: uint8[..., ceil(d/block)], the rollout's scale bytes.
      multiplier: the rollout's float32 decode multiplier, or None if it is the trainer's.
      valid: bool, broadcastable against the rows; false rows have no record.
    """

    kind: str = dataclasses.field(metadata={"static": True})
    data: UInt8[Any, "*rows bytes"] | None
    scales: UInt8[Any, "*rows blocks"]
    multiplier: Float[Any, "*#rows"] | None
    valid: Bool[Any, "*#rows"]
