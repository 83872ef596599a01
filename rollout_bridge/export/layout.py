"""Names, types and shapes of the tensors of an export, known before any weight is read.

NVFP4 follows ModelOpt: `weight` (codes), `weight_scale` (E4M3), `weight_scale_2` and `input_scale` (float32 decode multipliers).
MXFP4 follows compressed-tensors: `weight_packed` (codes) and `weight_scale` (E8M0 bytes). Scales are linear, row by row.
Multipliers of K and V lie beside the projections as `k_scale` and `v_scale`. Everything else is BF16 under its own name.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels import BlockFormat
from rollout_bridge.export.settings import ExportSettings
from trace_jax.errors import UserError
from trace_jax.models.key_map import FLOAT32_LEAVES, Entry
from trace_jax.models.policy import Policy
from trace_jax.models.registry import key_map

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
}
"""Type names of safetensors files and the NumPy types of the same bytes."""


class TensorSpec(NamedTuple):
    """One tensor of the export: its name, safetensors type and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in a file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def tensor_plan(policy: Policy, settings: ExportSettings) -> list[TensorSpec]:
    """Every tensor of the export, in file order."""
    layers = settings.quantized_layers(policy.config.num_layers)
    plan: list[TensorSpec] = []
    for entry in key_map(policy.family, policy.config):
        if settings.block is not None and is_quantized(entry, layers):
            plan += expert_tensors(module_of(entry), entry.shape, settings.block, settings.rounds_activations)
        else:
            plan.append(TensorSpec(entry.name, plain_dtype(entry), entry.shape))
        site = kv_site(entry)
        if site in settings.sites:
            plan.append(TensorSpec(kv_scale_name(entry, site), "F32", ()))
    return plan


def expert_tensors(module: str, shape: tuple[int, ...], block: BlockFormat, activations: bool) -> list[TensorSpec]:
    """The tensors of one quantized projection `[out, in]`, with the multiplier of its input where activations are rounded as well."""
    out, size = shape
    codes, scales = (out, block.codes_bytes(size)), (out, block.scales_bytes(size))
    if not block.has_multiplier:
        return [TensorSpec(f"{module}.weight_packed", "U8", codes), TensorSpec(f"{module}.weight_scale", "U8", scales)]
    tensors = [
        TensorSpec(f"{module}.weight", "U8", codes),
        TensorSpec(f"{module}.weight_scale", "F8_E4M3", scales),
        TensorSpec(f"{module}.weight_scale_2", "F32", ()),
    ]
    return [*tensors, TensorSpec(f"{module}.input_scale", "F32", ())] if activations else tensors


def unquantized_modules(policy: Policy, settings: ExportSettings) -> list[str]:
    """Exact names of the modules that are not quantized, each expert's projections among them; the head also where it is tied.

    Never a pattern: vLLM takes a name in the list for every module whose name contains it.
    """
    layers = settings.quantized_layers(policy.config.num_layers)
    modules = [module_of(entry) for entry in key_map(policy.family, policy.config) if not is_quantized(entry, layers)]
    return list(dict.fromkeys([*modules, "lm_head"]))


def require_whole_blocks(policy: Policy, settings: ExportSettings) -> None:
    """Refuses a model whose rows are no whole blocks, which engines do not load.

    Raises:
      UserError: a contraction width is not a multiple of the block.
    """
    block = settings.block
    for field in ("hidden_size", "expert_hidden_size"):
        size = getattr(policy.config, field)
        if block is not None and size % block.block:
            raise UserError(
                f"{field} {size} of the model is not a multiple of {block.block}, the block of {block.name}, and vLLM loads whole "
                "blocks only; export with --format bf16"
            )


def require_exportable(policy: Policy, settings: ExportSettings) -> None:
    """Refuses what cannot be written as the files of its family are.

    Raises:
      UserError: the family's files hold several weights in one tensor, or FP4 of a family without routed experts.
    """
    entries = key_map(policy.family, policy.config)
    if any(entry.part or entry.transposed for entry in entries):
        raise UserError(
            f"{policy.family} cannot be exported: its files hold the experts of a layer in one tensor, which this exporter does not write"
        )
    if settings.block is not None and not policy.config.moe_layer_ids:
        raise UserError(f"{policy.family} has no routed experts, so {settings.format} would quantize nothing; export with --format bf16")


def plain_dtype(entry: Entry) -> str:
    """Type of a tensor outside the quantized experts."""
    return "F32" if entry.path[-1] in FLOAT32_LEAVES else "BF16"


def is_quantized(entry: Entry, layers: tuple[int, ...]) -> bool:
    """Whether a checkpoint entry belongs to a routed expert of one of the layers."""
    return entry.is_expert and entry.layer in layers


def module_of(entry: Entry) -> str:
    """Name of the module that a checkpoint entry is a parameter of."""
    return entry.name.rpartition(".")[0]


def kv_site(entry: Entry) -> str | None:
    """`k` or `v` for the weight of that projection, None for every other entry."""
    sites = [site for site in "kv" if entry.name.endswith(f".self_attn.{site}_proj.weight")]
    return sites[0] if sites else None


def kv_scale_name(entry: Entry, site: str) -> str:
    """Name of the multiplier that lies beside a K or V projection."""
    return f"{module_of(entry)}.{site}_scale"
