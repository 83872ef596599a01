"""GPUs as their data sheets describe them."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.errors import UserError


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU; no kernel reaches them.

    Args:
      memory: bytes.
      bandwidth: of the memory, bytes per second.
      flops: dense products per second by format of the operands, times two; a format without an entry is computed in BF16.
      nvlink, host: bytes per second in one direction, to another GPU and to the memory of the host.
      source: of the figures.
    """

    name: str
    memory: float
    bandwidth: float
    flops: dict[str, float]
    nvlink: float
    host: float
    source: str

    def peak(self, fmt: str) -> float:
        """Operations per second with operands of a format."""
        return self.flops.get(fmt, self.flops["bf16"])


_HOPPER = {"bf16": 989e12, "fp8": 1979e12}
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 80e9, 3.35e12, _HOPPER, 450e9, 64e9, "NVIDIA H100 data sheet, SXM; sparse peaks halved"),
        Gpu("H200", 141e9, 4.8e12, _HOPPER, 450e9, 64e9, "NVIDIA H200 data sheet, SXM; sparse peaks halved"),
        Gpu("B200", 180e9, 8e12, {"bf16": 2.25e15, "fp8": 4.5e15, "fp4": 9e15}, 900e9, 64e9, "NVIDIA DGX B200 data sheet, an eighth of it"),
        Gpu("GB200", 186e9, 8e12, {"bf16": 2.5e15, "fp8": 5e15, "fp4": 10e15}, 900e9, 450e9, "NVIDIA GB200 NVL72 data sheet, per GPU"),
    )
}


def gpu_of(name: str) -> Gpu:
    """A GPU by name, in any case.

    Raises:
      UserError: it is not in the table.
    """
    found = GPUS.get(name.upper())
    if found is None:
        raise UserError(f"--gpu {name} is not in the table; write one of: {', '.join(GPUS)}")
    return found
