"""Which devices have block-scaled FP4 tensor cores that the kernel can use."""

import jax


def require_sm100() -> None:
    """Raises NotImplementedError, with what is there instead, unless the default device is an NVIDIA GPU of compute capability 10.x.

    Later consumer chips (12.x) have FP4 tensor cores but neither `tcgen05` nor tensor memory.
    """
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None) if device.platform == "gpu" else None
    if capability is None or str(capability).split(".")[0] != "10":
        found = device.device_kind if capability is None else f"{device.device_kind} (compute capability {capability})"
        raise NotImplementedError(f"the block-scaled kernel runs on NVIDIA GPUs of compute capability 10.x (SM100), not on {found}")
