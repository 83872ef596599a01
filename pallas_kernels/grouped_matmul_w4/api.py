"""`grouped_matmul_w4a16` and `matmul_w4`: the user's functions."""

import dataclasses

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from pallas_kernels.containers import Quantized
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import BlockFormat
from pallas_kernels.grouped_matmul_w4 import reference
from pallas_kernels.grouped_matmul_w4.layout import W4Weights, prepare_w4
from pallas_kernels.implementation import dispatch


def grouped_matmul_w4a16(
    x: Float[Array, "M K"],
    weights: Quantized | W4Weights,
    group_sizes: Int[Array, " E"],
    *,
    activations: BlockFormat | None = None,
    activation_multiplier: Float[ArrayLike, "*#rows"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    """Each row of x times the transposed FP4 weights of its expert; no bfloat16 copy of the weights is made by the kernel.

    Not differentiable: a trainer multiplies with `dequantize`d or `fake_quant`ized weights (`grouped_matmul`).

    Args:
      x: bfloat16, rows sorted by expert.
      weights: `quantize`d weights [E, N, K], or what `prepare_w4` made of them. The kernel needs the latter and prepares the former
        in every call; do it once after loading.
      group_sizes: int32 rows of each expert, zeros allowed. Rows beyond their sum give zeros.
      activations: the format to which x is rounded first (W4A4 numerics), None for none.
      activation_multiplier: as `fake_quant`'s multiplier, for the activations.
      implementation: "reference" (`quantize`d weights only), "pallas" or None for the best one here.

    Returns:
      [M, N] bfloat16: float32 sums, rounded once.

    Raises:
      ValueError: arguments that do not fit together.
      NotImplementedError: "pallas" asked for and the kernel cannot serve the arguments (the reason is given).
    """
    experts, size = _axes(weights)
    if x.shape[-1] != size:
        raise ValueError(f"rows of {x.shape[-1]} values meet weights of {size}; both are the contraction axis")
    if group_sizes.shape != (experts,):
        raise ValueError(f"{experts} experts need as many group sizes, got shape {group_sizes.shape}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"group sizes are counts of rows, got {group_sizes.dtype}; cast them to int32")
    if activations is not None:
        x = fake_quant(x, activations, activation_multiplier)
    elif activation_multiplier is not None:
        raise ValueError("activation_multiplier without activations; write activations=NVFP4 or leave both out")

    def run_reference():
        if isinstance(weights, W4Weights):
            raise ValueError("the reference takes weights as quantize returns them; pass those, or implementation='pallas'")
        return reference.grouped_matmul_w4a16(x, weights, group_sizes)

    def run_pallas():
        from pallas_kernels.grouped_matmul_w4 import pallas as kernel

        prepared = weights if isinstance(weights, W4Weights) else prepare_w4(weights)
        return kernel.grouped_matmul_w4a16(x, prepared, group_sizes)

    if implementation is None and isinstance(weights, W4Weights):
        return run_pallas()
    return dispatch("grouped_matmul_w4a16", implementation, reference=run_reference, pallas=run_pallas)


def matmul_w4(
    x: Float[Array, "*rows K"],
    weights: Quantized | W4Weights,
    *,
    activations: BlockFormat | None = None,
    activation_multiplier: Float[ArrayLike, "*#rows"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "*rows N"]:
    """x times transposed FP4 weights [N, K]; everything else as `grouped_matmul_w4a16` with one expert."""
    if activations is not None:
        x = fake_quant(x, activations, activation_multiplier)
    elif activation_multiplier is not None:
        raise ValueError("activation_multiplier without activations; write activations=NVFP4 or leave both out")
    if isinstance(weights, Quantized):
        if weights.codes.ndim != 2:
            raise ValueError(f"matmul_w4 takes weights [N, K], got codes of shape {weights.codes.shape}; use grouped_matmul_w4a16")
        multiplier = weights.multiplier
        if multiplier is not None and multiplier.ndim:
            multiplier = multiplier[None]
        weights = dataclasses.replace(weights, codes=weights.codes[None], scales=weights.scales[None], multiplier=multiplier)
    rows = x.reshape(-1, x.shape[-1])
    sizes = jnp.full((1,), rows.shape[0], jnp.int32)
    out = grouped_matmul_w4a16(rows, weights, sizes, implementation=implementation)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _axes(weights: Quantized | W4Weights) -> tuple[int, int]:
    """(experts, K) of the weights."""
    if isinstance(weights, W4Weights):
        return weights.multiplier.shape[0], weights.size
    if weights.codes.ndim != 3:
        raise ValueError(f"weights need the axes [experts, rows, bytes], got codes of shape {weights.codes.shape}; see matmul_w4")
    return weights.codes.shape[0], weights.size
