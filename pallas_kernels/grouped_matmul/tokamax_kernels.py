"""The three grouped products over tokamax's Mosaic GPU kernels (NVIDIA, compute capability 9 and 10).

tokamax 0.0.17 knows tuned configurations of an H100 but not of an H200, where it falls back to a slow default, and results of
`tokamax.autotune` that were saved and loaded again are not found, because they are looked up by an operation that holds a
fresh closure. So the configuration is handed to the operation itself. `tokamax_configs.json` has one for each device and product;
`python -m pallas_kernels.grouped_matmul.tune` measures them again on the device it runs on and rewrites its entry.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.grouped_matmul.reference import FORWARD, GRAD_WEIGHTS, GRAD_X

TABLE = Path(__file__).with_name("tokamax_configs.json")

DIMENSIONS = {"forward": FORWARD, "grad_x": GRAD_X, "grad_weights": GRAD_WEIGHTS}

Configs = dict[str, dict[str, Any]]
"""Product name to the fields of tokamax's Config; a missing product leaves the choice to tokamax."""


def device_configs(device_kind: str) -> Configs:
    """The table's entry for a device, empty if there is none."""
    return json.loads(TABLE.read_text()).get(device_kind, {})


def forward(
    x: Float[Array, "N K"], weights: Float[Array, "E F K"], group_sizes: Int[Array, " E"], configs: Configs | None = None
) -> Float[Array, "N F"]:
    """As the reference. Configs None takes the table's. Raises NotImplementedError if tokamax cannot serve the arguments."""
    # tokamax wants the weights as [E, K, F] and makes that copy itself.
    return _inside(_product("forward", x, weights, group_sizes, configs), group_sizes)


def grad_x(
    cotangent: Float[Array, "N F"], weights: Float[Array, "E F K"], group_sizes: Int[Array, " E"], configs: Configs | None = None
) -> Float[Array, "N K"]:
    """As the reference; configs and raises as `forward`."""
    return _inside(_product("grad_x", cotangent, weights, group_sizes, configs), group_sizes)


def grad_weights(
    cotangent: Float[Array, "N F"], x: Float[Array, "N K"], group_sizes: Int[Array, " E"], configs: Configs | None = None
) -> Float[Array, "E F K"]:
    """As the reference; configs and raises as `forward`."""
    return _product("grad_weights", cotangent, x, group_sizes, configs)


def operation(config: dict[str, Any] | None) -> Any:
    """tokamax's operation with a configuration, or with its own choice.

    Raises ImportError, which names the extra, without tokamax.
    """
    try:
        from tokamax._src.ops.ragged_dot.pallas_mosaic_gpu import PallasMosaicGpuRaggedDot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError("implementation='tokamax' needs tokamax: pip install 'trace-jax[tokamax]' (Python 3.12 or later)") from error
    plain = PallasMosaicGpuRaggedDot()
    return plain if config is None else plain.replace(config=plain.config_cls(**config))


def _product(name, left, right, group_sizes, configs):
    call = operation(None)
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"tokamax's grouped kernels run on NVIDIA GPUs, not on {jax.default_backend()}")
    if left.dtype != jnp.bfloat16:
        raise NotImplementedError(f"tokamax's grouped kernels take bfloat16, got {left.dtype}")
    configs = device_configs(jax.devices()[0].device_kind) if configs is None else configs
    if name in configs:
        call = operation(configs[name])
    return call(
        left, right, group_sizes=group_sizes, ragged_dot_dimension_numbers=DIMENSIONS[name], preferred_element_type=jnp.dtype(left.dtype)
    )


@jax.jit
def _inside(out: Float[Array, "N d"], group_sizes: Int[Array, " E"]) -> Float[Array, "N d"]:
    """Zeros in the rows beyond the groups, which tokamax leaves unwritten."""
    inside = jnp.arange(out.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes, dtype=jnp.int32)
    return jnp.where(inside[:, None], out, jnp.zeros((), out.dtype))
