"""Checkpoints whose weights are stored in FP8 or FP4, read as the float32 values that they stand for.

A quantized weight is several tensors: codes, scales, and for NVFP4 a scale of the whole tensor. They are shown as the one tensor that an
unquantized checkpoint has, under its name. Four layouts are read, told by `quantization_config` and the names of the tensors:

* `fp8` (DeepSeek-V3, Qwen): `NAME` in E4M3 and `NAME_scale_inv`, one factor for all or for each block of `weight_block_size`;
* `compressed-tensors`: E4M3 with `NAME_scale` (one, or one per row); `NAME_packed`, E4M3 `NAME_scale` and the *divisor* `NAME_global_scale`
  (NVFP4); `NAME_packed` and E8M0 `NAME_scale` (MXFP4);
* `modelopt`: E4M3 with `NAME_scale`; packed `NAME`, E4M3 `NAME_scale` and the *factor* `NAME_scale_2` (NVFP4);
* `mxfp4` (gpt-oss): `NAME_blocks` and E8M0 `NAME_scales`, blocks along rows; unquantized, gpt-oss has these matrices transposed.

Scales of activations and of the KV cache belong to the engine that served the checkpoint and are passed over: a policy calibrates its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from pallas_kernels import MXFP4, NVFP4
from pallas_kernels.formats import E2M1_VALUES
from trace_jax.errors import UserError
from trace_jax.models.tensor_files import TensorFiles

METHODS = ("fp8", "compressed-tensors", "modelopt", "mxfp4")
"""Values of `quant_method` that are read."""

SERVING_SUFFIXES = (
    ".input_scale", ".input_global_scale", ".activation_scale", ".q_scale", ".k_scale", ".v_scale", ".k_bias", ".v_bias", ".weight_shape",
)  # fmt: skip
"""Endings of tensors that no weight needs."""

DATA_SUFFIXES = {"_packed": ("_scale", "_global_scale"), "_blocks": ("_scales",), "": ("_scale_inv", "_scale", "_scale_2")}
"""Ending of the codes' name -> endings of the tensors that may explain them."""

_CODE_VALUES = np.array([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], np.float32)


class QuantizedTensorFiles(TensorFiles):
    """`TensorFiles` of a quantized checkpoint; names and shapes are those of the weights.

    Args:
      directory: holds safetensors.
      quantization: `quantization_config` of config.json.

    Raises:
      UserError: as `TensorFiles`, or the method is none of `METHODS`.
    """

    def __init__(self, directory: Path, quantization: dict[str, Any]):
        method = quantization.get("quant_method")
        if method not in METHODS:
            raise UserError(
                f"{directory}: config.json: quantization_config.quant_method is {method!r}; read are {', '.join(METHODS)}: "
                "take such a checkpoint or the unquantized one"
            )
        super().__init__(directory)
        self._block = quantization.get("weight_block_size")
        self._parts = _weights(super().names)

    @property
    def names(self) -> set[str]:
        """Names of the weights."""
        return set(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight, without reading it."""
        data, *_ = self._parts[name]
        shape = super().shape(data)
        if data.endswith("_blocks"):
            return (*shape[:-3], shape[-2] * shape[-1] * 2, shape[-3])
        return (*shape[:-1], shape[-1] * 2) if self._is_packed(name) else shape

    def read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """One weight as float32: code times scale, not rounded again.

        Raises:
          UserError: codes and scales do not belong together, a type is not one of a quantized weight, or a value is NaN or infinity.
        """
        data, *scales = self._parts[name]
        if not scales:
            return super().read(name)
        codes, found = self.stored(data), {scale.removeprefix(name): self.stored(scale) for scale in scales}
        try:
            if data.endswith("_blocks"):
                values = _mxfp4(codes.reshape(*codes.shape[:-2], -1), found["_scales"]).swapaxes(-1, -2)
            elif self._is_packed(name):
                values = _packed(codes, found)
            else:
                values = _scaled(codes, found, self._block)
        except ValueError as error:
            raise UserError(f"{self.directory}: {name}: {error}; the checkpoint is damaged or in a layout that is not read") from error
        return self.require_finite(name, values)

    def _is_packed(self, name: str) -> bool:
        data, *scales = self._parts[name]
        return data != name or (bool(scales) and self.dtype(data) == "U8")


def _weights(stored: set[str]) -> dict[str, tuple[str, ...]]:
    """Name of a weight -> the stored tensors that make it, its codes first."""
    parts: dict[str, tuple[str, ...]] = {}
    explained: set[str] = set()
    for name in stored:
        ending = next(ending for ending in DATA_SUFFIXES if name.endswith(ending))
        weight = name.removesuffix(ending) if ending else name
        scales = tuple(weight + suffix for suffix in DATA_SUFFIXES[ending] if weight + suffix in stored)
        if scales:
            parts[weight] = (name, *scales)
            explained.update((name, *scales))
    plain = {name: (name,) for name in stored - explained if not name.endswith(SERVING_SUFFIXES)}
    return {**plain, **parts}


def _scaled(codes: Shaped[np.ndarray, "*rows d"], scales: dict[str, np.ndarray], block: list[int] | None) -> Float[np.ndarray, "*rows d"]:
    """E4M3 codes times one factor, one per row or expert, or one per block of rows and columns."""
    if codes.dtype != ml_dtypes.float8_e4m3fn or len(scales) != 1:
        raise ValueError(f"codes of type {codes.dtype} with {' and '.join(sorted(scales))}")
    (scale,) = (value.astype(np.float32) for value in scales.values())
    values = codes.astype(np.float32)
    if scale.size == 1:
        return values * scale.reshape(())
    if block is None:
        if scale.ndim != codes.ndim or any(size not in (1, whole) for size, whole in zip(scale.shape, codes.shape, strict=True)):
            raise ValueError(f"scales of shape {scale.shape} for codes of shape {codes.shape}, and no weight_block_size")
        return values * scale
    expected = (*codes.shape[:-2], *(-(-whole // size) for whole, size in zip(codes.shape[-2:], block, strict=True)))
    if scale.shape != expected:
        raise ValueError(f"scales of shape {scale.shape} instead of {expected}")
    for axis, size in zip((-2, -1), block, strict=True):
        scale = np.repeat(scale, size, axis).take(np.arange(codes.shape[axis]), axis)
    return values * scale


def _packed(codes: UInt8[np.ndarray, "*rows bytes"], scales: dict[str, np.ndarray]) -> Float[np.ndarray, "*rows d"]:
    """FP4 of compressed-tensors or ModelOpt."""
    if scales.keys() == {"_scale"} and scales["_scale"].dtype == np.uint8:
        return _mxfp4(codes, scales["_scale"])
    if scales.keys() == {"_scale", "_global_scale"}:
        factor = 1 / scales["_global_scale"].astype(np.float32)
    elif scales.keys() == {"_scale", "_scale_2"}:
        factor = scales["_scale_2"].astype(np.float32)
    else:
        raise ValueError(f"FP4 codes with {' and '.join(sorted(scales))}")
    if factor.size != 1 and factor.shape != codes.shape[:-2]:
        raise ValueError(f"{factor.size} scales of whole tensors")
    factor = factor.reshape(factor.shape + (1, 1)) if factor.size > 1 else factor.reshape(())
    return _blocks(codes, scales["_scale"].astype(np.float32) * factor, NVFP4.block)


def _mxfp4(codes: UInt8[np.ndarray, "*rows bytes"], scales: UInt8[np.ndarray, "*rows blocks"]) -> Float[np.ndarray, "*rows d"]:
    return _blocks(codes, scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), MXFP4.block)


def _blocks(codes: UInt8[np.ndarray, "*rows bytes"], scales: Float[np.ndarray, "*rows blocks"], size: int) -> Float[np.ndarray, "*rows d"]:
    """E2M1 codes, two a byte and the low nibble first, times the scale of their block."""
    if scales.shape != (*codes.shape[:-1], codes.shape[-1] * 2 // size):
        raise ValueError(f"scales of shape {scales.shape} for {codes.shape[-1] * 2} values a row in blocks of {size}")
    values = _CODE_VALUES[np.stack([codes & 15, codes >> 4], axis=-1)]
    return (values.reshape(*scales.shape, size) * scales[..., None]).reshape(*codes.shape[:-1], -1)
