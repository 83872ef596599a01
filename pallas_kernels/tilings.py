"""The sizes of the kernels' programs on each kind of device: the table `tilings.json`, which `python -m pallas_kernels.tune` writes.

Sizes decide about time: a quantizer's bytes are the same under all of them, a product's sum takes one of the orders that its
tests allow. What a device has no entry for, it takes from `DEFAULT`; interpret mode does so too.
"""

import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import jax

Sizes: TypeAlias = Mapping[str, int]

PATH = Path(__file__).with_name("tilings.json")
DEFAULT = "NVIDIA H200"


@functools.cache
def table() -> dict[str, dict[str, dict[str, int]]]:
    """The sizes by kind of device (`jax.Device.device_kind`) and kernel."""
    return json.loads(PATH.read_text())


def lookup(kernel: str, device: str | None = None) -> Sizes:
    """The sizes of a kernel on a kind of device, by default the one here. Raises KeyError for a kernel without sizes."""
    kind = jax.devices()[0].device_kind if device is None else device
    return table().get(kind, {}).get(kernel) or table()[DEFAULT][kernel]


def write(device: str, kernel: str, sizes: Sizes) -> None:
    """Puts the sizes of a kernel on a kind of device into the table. The file is replaced as a whole."""
    entries = {**table(), device: {**table().get(device, {}), kernel: dict(sizes)}}
    unfinished = PATH.with_suffix(".tmp")
    unfinished.write_text(text(entries))
    os.replace(unfinished, PATH)
    table.cache_clear()


def text(entries: dict[str, dict[str, dict[str, int]]]) -> str:
    """The table as JSON, a kernel a line."""
    devices = []
    for device, kernels in sorted(entries.items()):
        lines = [f"  {json.dumps(kernel)}: {json.dumps(sizes)}" for kernel, sizes in sorted(kernels.items())]
        devices.append(f" {json.dumps(device)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(devices) + "\n}\n"
