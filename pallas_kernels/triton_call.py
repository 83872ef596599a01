"""How the Triton kernels are called: the one place that knows jax-triton.

A kernel of `pallas_kernels.triton_kernels` takes its input arrays, the number of groups, its output arrays and constants. Whatever the
leading axes are, they are rows to it; under `jax.vmap` there is one more of them.
"""

import importlib
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from pallas_kernels.formats import BlockFormat

_TILE = 128  # one group a thread
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MOST_GROUPS = 2**31 - 1 - _TILE  # their numbers are int32


def launch(
    op: str,
    inputs: Sequence[Shaped[Array, "..."]],
    outputs: Sequence[jax.ShapeDtypeStruct],
    rows: Sequence[int],
    size: int,
    fmt: BlockFormat,
    **constants: Any,
) -> Sequence[Shaped[Array, "..."]]:
    """The results of an operation's kernel for a tensor [*rows, size] in blocks of the format.

    Args:
      op: the operation, which names the kernel.
      inputs: the arrays that the kernel takes, in its order.
      outputs: shapes and dtypes of the results.
      rows: leading axes of the tensor.
      size: its last axis.
      fmt: the format.
      constants: the kernel's other constants.

    Raises NotImplementedError (with the reason) if the kernel cannot serve the shape, a dtype or the device, or a package is missing.
    """
    groups = math.prod(rows) * fmt.scales_bytes(size)
    if groups == 0:
        raise NotImplementedError(f"the Triton kernels need at least one row, got shape {(*rows, size)}")
    if groups > _MOST_GROUPS:
        raise NotImplementedError(f"the Triton kernels take at most {_MOST_GROUPS} blocks, got shape {(*rows, size)}; split the rows")
    for array in (*inputs, *outputs):
        if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype not in _DTYPES:
            raise NotImplementedError(f"the Triton kernels have no {array.dtype}; take bfloat16, float16 or float32")
    constants |= {"SIZE": size, "BLOCK": fmt.block, "SCALE": fmt.scale}
    return run(_kernel(op), inputs, groups, outputs, constants)


def row_value(value: Shaped[Array, "*m"] | None, rows: Sequence[int]) -> tuple[Shaped[Array, " m"], bool]:
    """(what a kernel gets of a scalar or row value, whether that is an entry for each row); None stands for a value without use."""
    if value is None:
        return jnp.ones(1, jnp.float32), False
    return (value.reshape(1), False) if value.size == 1 else (jnp.broadcast_to(value, rows).reshape(-1), True)


def over_rows(function: Callable[[Any, Any], Any], tensors: Sequence[Array | None], values: Sequence[Array | None]) -> Any:
    """function(tensors, values), which under vmap runs once with one more leading axis: jax-triton has no batching rule.

    Args:
      function: its results have the leading axes of the tensors.
      tensors: arrays [*rows, n].
      values: scalars, or arrays with one axis for every axis of the rows.
    """
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, batched, tensors, values):
        def with_axis(tensor, is_batched):
            return tensor if is_batched else jnp.broadcast_to(tensor, (size, *tensor.shape))

        tensors = jax.tree.map(with_axis, tensors, batched[0])
        rank = tensors[0].ndim - 2

        def row_value_with_axis(value, is_batched):
            if not is_batched:
                return value[None] if value.ndim else value
            return value if value.ndim > 1 else value.reshape(size, *[1] * rank)

        out = mapped(tensors, jax.tree.map(row_value_with_axis, values, batched[1]))
        return out, jax.tree.map(lambda leaf: True, out)

    return mapped(tuple(tensors), tuple(values))


def run(
    kernel: Any, inputs: Sequence[Shaped[Array, "..."]], groups: int, outputs: Sequence[jax.ShapeDtypeStruct], constants: dict[str, Any]
) -> Sequence[Shaped[Array, "..."]]:
    """The results of a kernel on the GPU. Raises NotImplementedError where there is none, or no jax-triton."""
    backend = jax.default_backend()
    if backend != "gpu":
        raise NotImplementedError(f"the Triton kernels run on NVIDIA GPUs, not on {backend}; take implementation='reference' or None")
    try:
        import jax_triton  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NotImplementedError("the Triton kernels need jax-triton; run: pip install 'trace-jax[triton]'") from error

    # A contraction would change bits. Version 0.4 has other names for both arguments.
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:
        named: dict[str, Any] = {"out_type": tuple(outputs), "backend_options": {"enable_fp_fusion": False}}
    else:
        named = {"out_shape": tuple(outputs), "enable_fp_fusion": False}
    grid = (-(-groups // _TILE),)
    return jax_triton.triton_call(*inputs, groups, kernel=kernel, grid=grid, num_warps=_TILE // 32, TILE=_TILE, **constants, **named)


def _kernel(op: str) -> Any:
    try:
        return getattr(importlib.import_module(f"pallas_kernels.triton_kernels.{op}"), op)
    except ModuleNotFoundError as error:
        raise NotImplementedError(f"the Triton kernels need {error.name}; run: pip install 'trace-jax[triton]'") from error
