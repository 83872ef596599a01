"""What a kernel should reach, and whether it does."""

from typing import Literal, NamedTuple


class Target(NamedTuple):
    """A bound.

    Args:
      kind: "share" of the copy's bandwidth, at least; "teraflops" a second, at least; "ratio" of our time to the peer's, at most.
      bound: the number.
      against: for "ratio", how the name of the peer begins; with another peer the target is not judged.
    """

    kind: Literal["share", "teraflops", "ratio"]
    bound: float
    against: str = ""

    @property
    def text(self) -> str:
        """The target in words."""
        if self.kind == "share":
            return f"share of copy bandwidth >= {self.bound:.2f}"
        if self.kind == "teraflops":
            return f">= {self.bound:.0f} TFLOP/s"
        return f"<= {self.bound:.2f} of the time of {self.against or 'the best peer'}"

    def met(self, time_us: float, limit_share: float, flops: int | None, peer: str | None, ratio: float | None) -> bool | None:
        """Whether a measurement reaches the target; None where it cannot be judged."""
        if self.kind == "share":
            return limit_share >= self.bound
        if self.kind == "teraflops":
            return None if flops is None else flops / time_us / 1e6 >= self.bound
        return None if peer is None or ratio is None or not peer.startswith(self.against) else ratio <= self.bound
