"""Measures tokamax's configurations for the grouped products and writes the entry of this device into `tokamax_configs.json`.

    python -m pallas_kernels.grouped_matmul.tune --experts 128 --features 768 --size 2048 --rows 65536

The candidates are the ones among which the winners of tokamax's own search on an H100 lie; its whole search has 384.
"""

import argparse
import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.tokamax_kernels import DIMENSIONS, TABLE, Configs, operation


def candidates() -> list[dict[str, Any]]:
    """Fields of tokamax's Config: tiles of 128 x 64 in steps of 128 did best in every shape of its table."""
    schedules = [(False, 0, 1), *itertools.product((True, False), (0, 1), (1, 4, 8))]
    return [
        {"block_m": 128, "block_n": 64, "block_k": 128, "num_stages": stages, "split_k": 1}
        | {"persistent": persistent, "grid_minor_dim": minor, "grid_tile_width": width}
        for stages in (2, 4)
        for persistent, minor, width in dict.fromkeys(schedules)
    ]


def tune(experts: int, features: int, size: int, rows: int) -> Configs:
    """The fastest candidate of each product, by tokamax's own timing, on the default device."""
    import tokamax  # pyright: ignore[reportMissingImports]

    shape = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.bfloat16)  # noqa: E731
    sizes = tokamax.RaggedDotGroupSizes(jax.ShapeDtypeStruct((experts,), jnp.int32), rows)
    x, weights, cotangent = shape(rows, size), shape(experts, features, size), shape(rows, features)
    operands = {"forward": (x, weights), "grad_x": (cotangent, weights), "grad_weights": (cotangent, x)}
    plain = operation(None)
    configs = {plain.config_cls(**fields): fields for fields in candidates()}
    best = {}
    for name, (left, right) in operands.items():
        bound = plain.bind(
            left, right, group_sizes=sizes, ragged_dot_dimension_numbers=DIMENSIONS[name], preferred_element_type=jnp.dtype(jnp.bfloat16)
        )
        best[name] = configs[bound.autotune(set(configs), cache_results=False).fastest_config]
    return best


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 128), ("features", 768), ("size", 2048), ("rows", 65536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    table = json.loads(TABLE.read_text())
    table[jax.devices()[0].device_kind] = tune(**vars(parser.parse_args()))
    TABLE.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
