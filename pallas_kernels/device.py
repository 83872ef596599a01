"""Where the Pallas bodies run."""

import jax


def interpreted(interpret: bool | None) -> bool:
    """Whether to interpret: as told, or on CPU. Raises NotImplementedError on devices that are neither CPU nor GPU."""
    if interpret is not None:
        return interpret
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise NotImplementedError(f"the Pallas kernels run on CPU (interpret mode) and NVIDIA GPUs, not on {backend}")
    return backend == "cpu"
