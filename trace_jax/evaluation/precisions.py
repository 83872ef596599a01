"""The precisions of a rollout: what each one sets, the methods that make sense at it, and what an engine's is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.config import METHODS, Config, from_mapping
from trace_jax.config.keys import leaves, overlay
from trace_jax.errors import UserError
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES
from trace_jax.rollout.engine import Capabilities

PRECISIONS: dict[str, dict[str, Any]] = {
    name: {"rollout": {"weights": name, "activations": name, "kv_cache": {"k": name, "v": name}}}
    for name in ("bf16", "fp8", "nvfp4", "mxfp4")
}
"""Precision -> the config keys that set every quantized tensor of the rollout to it."""

METHODS_OF = {
    "bf16": ("bf16",),
    "fp8": ("naive", "qat"),
    "nvfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
    "mxfp4": ("naive", "qat", "trace_scales", "trace", "trace_full"),
}
"""Methods that make sense at a precision, each following the rollout more closely than the one before; only FP4 codes can be recorded."""


def require_precision(precision: str) -> None:
    """Raises UserError for a precision that does not exist."""
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown; write one of: {', '.join(PRECISIONS)}")


def precision_config(config: Config, precision: str, method: str) -> Config:
    """The config with the rollout at a precision and the trainer as a method says, at every site.

    A precision that leaves no residual has no residual compensation either.

    Raises:
      UserError: there is no such precision, or the method is guided and the rollout compensates residuals.
    """
    require_precision(precision)
    method = "bf16" if precision == "bf16" else method
    # A preset counts on the default sites; the run's own may lack one that the preset guides.
    keys = overlay(METHODS[method], {"guidance": {"sites": list(RECORDED_SITES)}})
    if precision not in BLOCK_FORMATS:
        keys = overlay(keys, {"rollout": {"residual_compensation": {"fraction": 0.0}}})
    return from_mapping(overlay(config.model_dump(mode="json"), overlay(keys, PRECISIONS[precision])) | {"method": method})


def measurable(config: Config, plan: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The methods of each precision that can follow the config's rollout, and why others cannot, by method.

    Raises:
      UserError: nothing is left at a precision.
    """
    guided = {name for name, keys in METHODS.items() if keys["train_quant"]["activations"] == "guided"}
    if config.rollout.residual_compensation.fraction == 0:
        guided = set()
    kept = {precision: [name for name in methods if name not in guided] for precision, methods in plan.items()}
    reason = "no record holds what rollout.residual_compensation adds; set its fraction to 0.0 to measure this method"
    for precision, methods in kept.items():
        if not methods:
            raise UserError(f"--methods: {', '.join(plan[precision])} cannot be measured at {precision}: {reason}")
    return kept, {name: f"{name} was not measured: {reason}" for methods in plan.values() for name in methods if name in guided}


def precision_overrides(config: Config, precision: str) -> str:
    """The settings that bring a config's rollout to a precision, as on the command line; empty where it is there already."""
    values, keys = config.model_dump(mode="json"), PRECISIONS[precision]
    return "" if overlay(values, keys) == values else " ".join(f"{name}={value}" for name, value in leaves(keys))


def precision_name(capabilities: Capabilities) -> str:
    """What an engine really executes: `nvfp4` where everything is in one format, otherwise each part with its own."""
    formats = {name: getattr(capabilities, name) for name in ("weights", "activations", "k", "v")}
    if len(set(formats.values())) == 1:
        return capabilities.weights
    return ", ".join(f"{part} {name}" for part, name in formats.items())
