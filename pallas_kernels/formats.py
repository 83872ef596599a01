"""The block formats: what is stored for a block of FP4 values.

Both formats hold E2M1 codes (0, .5, 1, 1.5, 2, 3, 4, 6 and a sign) along the contraction axis, which is always the last
axis. They differ in the block length and in the scale:

* NVFP4: 16 codes, one E4M3 scale byte, and one float32 multiplier for the whole tensor (or row).
* MXFP4: 32 codes, one E8M0 scale byte (a power of two), no multiplier.
"""

import dataclasses
from typing import Literal

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the codes 0..7; code + 8 is the negative."""

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where rounding passes from one magnitude to the next."""

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF

RECIPROCAL_SIX = 0.16666539013385773
"""float32 of (1/6)(1 - 2^-17): the one constant of the NVFP4 block scale (docs/numerics.md)."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A 4-bit block format. Hashable, so it can be a static argument of a jitted function.

    Args:
      name: the name used in configs and files.
      block: values that share a scale.
      scale: encoding of the scale byte.
      has_multiplier: whether a float32 multiplier stands above the block scales.

    Raises ValueError for blocks that are not whole bytes of recorded bits, or a scale without the rule that belongs to it.
    """

    name: str
    block: int
    scale: Literal["e4m3", "e8m0"]
    has_multiplier: bool

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"format {self.name!r} has blocks of {self.block} values; write a multiple of 8")
        if self.has_multiplier != (self.scale == "e4m3"):
            raise ValueError(f"format {self.name!r}: E4M3 scales stand under a multiplier and E8M0 scales do not; change one of the two")

    def codes_bytes(self, size: int) -> int:
        """Bytes of packed codes for a row of `size` values."""
        return -(-size // 2)

    def scales_bytes(self, size: int) -> int:
        """Scale bytes for a row of `size` values; the last block may be partly padding."""
        return -(-size // self.block)


NVFP4 = BlockFormat("nvfp4", 16, "e4m3", True)
MXFP4 = BlockFormat("mxfp4", 32, "e8m0", False)

_FORMATS = {format_.name: format_ for format_ in (NVFP4, MXFP4)}


def block_format(name: str) -> BlockFormat:
    """The format called `name` ("nvfp4" or "mxfp4"). Raises ValueError for any other name."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown block format {name!r}; write one of {', '.join(sorted(_FORMATS))}") from None
