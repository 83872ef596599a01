"""What a measurement is made of."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call


class Setting(NamedTuple):
    """Where the benchmark runs.

    Args:
      small: toy shapes, few repetitions, and the Pallas kernels also on CPU (interpreted, so that their time says nothing).
      on_gpu: the kernels are compiled.
    """

    small: bool
    on_gpu: bool

    @property
    def toy(self) -> bool:
        """Whether products and attention take toy shapes: at real ones a CPU would need hours."""
        return self.small or not self.on_gpu

    @property
    def implementations(self) -> tuple[str, ...]:
        """Our own implementations that are timed."""
        return ("reference", "pallas") if self.on_gpu or self.small else ("reference",)


class Peer(NamedTuple):
    """Another way to the same result.

    Args:
      name: as the row names it.
      call: what is timed.
      bytes: what it has to move; a time in which the device cannot move it is an artefact and does not count.
    """

    name: str
    call: Call
    bytes: int = 0


class Case(NamedTuple):
    """One row to be: an implementation of an op at a shape.

    Args:
      op: name, and where there are several, format and variant, after slashes.
      implementation: "reference", "pallas" or "triton".
      shape: in words and numbers.
      call: what is timed.
      bytes: what the op has to read and write, whatever the implementation really moves.
      flops: of products, else None: the op is bound by memory.
      peers: the fastest is the row's peer.
      target: what a compiled kernel should reach.
    """

    op: str
    implementation: str
    shape: str
    call: Call
    bytes: int
    flops: int | None = None
    peers: tuple[Peer, ...] = ()
    target: Target | None = None


def against_reference(
    op: str, shape: str, calls: Mapping[str, Call], moved: int, flops: int | None = None, target: Target | None = None
) -> Iterator[Case]:
    """A row for each of our implementations; the reference is the peer of the kernels."""
    for implementation, call in calls.items():
        has_peer = implementation != "reference"
        peers = (Peer("jnp reference", calls["reference"]),) if has_peer else ()
        yield Case(op, implementation, shape, call, moved, flops, peers, target if has_peer else None)
