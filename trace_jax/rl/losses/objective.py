"""What a loss says about each token."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float32


class TokenObjective(NamedTuple):
    """Per token: the objective to be raised, and whether a bound acts on its ratio. Only where the mask is true does it count."""

    value: Float32[Array, "B T"]
    clipped: Bool[Array, "B T"]
