"""The description of the quantization that vLLM reads: `quantization_config` of config.json, and ModelOpt's own file."""

from __future__ import annotations

from typing import Any

from pallas_kernels import MXFP4, NVFP4
from rollout_bridge.export.layout import unquantized_modules
from rollout_bridge.export.settings import ExportSettings
from trace_jax.models.policy import Policy

EXPERTS = ".experts"
"""End of the name of what contains the routed experts of a layer."""

MODELOPT_FILE = "hf_quant_config.json"
PRODUCER = {"name": "modelopt"}
"""Readers of the ModelOpt layout look for this name; it names the layout."""


def quantization_config(policy: Policy, settings: ExportSettings) -> dict[str, Any] | None:
    """`quantization_config` of config.json; None for BF16."""
    if settings.format == "bf16":
        return None
    if settings.format == "mxfp4":
        return _compressed_tensors(unquantized_modules(policy, settings), settings.rounds_activations)
    arguments = {"num_bits": 4, "type": "float", "group_size": NVFP4.block, "dynamic": False}
    inputs = arguments if settings.rounds_activations else None
    config = {
        "quant_method": "modelopt",
        "quant_algo": quant_algo(settings),
        "group_size": NVFP4.block,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": inputs}},
        "ignore": modelopt_exclusions(policy, settings),
        "producer": PRODUCER,
    }
    if settings.declare_kv:
        config["kv_cache_scheme"] = {"num_bits": 4, "type": "float", "dynamic": False}
    return config


def hf_quant_config(policy: Policy, settings: ExportSettings) -> dict[str, Any]:
    """The same for `hf_quant_config.json`, which older readers of NVFP4 take; they want every key."""
    quantization = {
        "quant_algo": quant_algo(settings),
        "kv_cache_quant_algo": "NVFP4" if settings.declare_kv else None,
        "group_size": NVFP4.block,
        "exclude_modules": modelopt_exclusions(policy, settings),
    }
    return {"producer": PRODUCER, "quantization": quantization}


def quant_algo(settings: ExportSettings) -> str:
    """ModelOpt's name of W4A4 and of W4A16, which must not be taken for one another."""
    return "NVFP4" if settings.rounds_activations else "W4A16_NVFP4"


def modelopt_exclusions(policy: Policy, settings: ExportSettings) -> list[str]:
    """Names of unquantized modules as ModelOpt lists them: the experts of a layer under the name of their container."""
    containers = [
        module.partition(f"{EXPERTS}.")[0] + EXPERTS if f"{EXPERTS}." in module else module
        for module in unquantized_modules(policy, settings)
    ]
    return list(dict.fromkeys(containers))


def _compressed_tensors(excluded: list[str], activations: bool) -> dict[str, Any]:
    arguments = {
        "num_bits": 4,
        "type": "float",
        "strategy": "group",
        "group_size": MXFP4.block,
        "symmetric": True,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": ["Linear"],
        "weights": arguments | {"dynamic": False},
        "input_activations": arguments | {"dynamic": True} if activations else None,
        "output_activations": None,
        "format": "mxfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": excluded,
        "kv_cache_scheme": None,
    }
