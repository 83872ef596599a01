"""The block formats, as in `pallas_kernels.formats`, which the tests compare; a worker does not have that package."""

import dataclasses
from typing import Literal

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Where rounding passes from one magnitude (0, .5, 1, 1.5, 2, 3, 4, 6) to the next."""

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E8M0_NAN = 0xFF

RECIPROCAL_SIX = 0.16666539013385773
"""float32 of (1/6)(1 - 2^-17)."""


@dataclasses.dataclass(frozen=True)
class BlockFormat:
    """A 4-bit block format along the last axis.

    Args:
      name: the name used in configs and files.
      block: values that share a scale.
      scale: encoding of the scale byte; E4M3 scales stand under a float32 multiplier, E8M0 scales do not.
    """

    name: str
    block: int
    scale: Literal["e4m3", "e8m0"]

    @property
    def has_multiplier(self) -> bool:
        """Whether a float32 multiplier stands above the block scales."""
        return self.scale == "e4m3"


NVFP4 = BlockFormat("nvfp4", 16, "e4m3")
MXFP4 = BlockFormat("mxfp4", 32, "e8m0")
