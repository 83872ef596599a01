"""The precisions of a rollout: what each one sets, the methods that make sense at it, and what an engine's is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.config import METHODS, Config, from_mapping
from trace_jax.config.keys import leaves, overlay
from trace_jax.errors import UserError
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES
from trace_jax.rollout.engine import Capabilities


def _tensors(weights: str, rest: str) -> dict[str, Any]:
    return {"rollout": {"weights": weights, "activations": rest, "kv_cache": {"k": rest, "v": rest}}}


PRECISIONS: dict[str, dict[str, Any]] = {
    **{name: _tensors(name, name) for name in ("bf16", "fp8", "nvfp4", "mxfp4")},
    "nvfp4_4over6": _tensors("nvfp4_4over6", "nvfp4"),
}
"""Precision -> the config keys that set every quantized tensor of the rollout to it."""

METHODS_OF = {
    "bf16": ("bf16",),
    "fp8": ("naive", "qat"),
    "nvfp4": ("naive", "qat_w4a16", "qat", "quads", "trace_scales", "trace", "trace_full"),
    "mxfp4": ("naive", "qat_w4a16", "qat", "quads", "trace_scales", "trace", "trace_full"),
}
"""Methods that make sense at a precision, from the loosest to the one that follows the rollout most closely (rounding the weights alone has
shown no smaller gap than `naive`); only FP4 codes can be recorded."""


def methods_of(config: Config, precision: str) -> tuple[str, ...]:
    """The methods that make sense for a config's rollout at a precision: `quads` where it is compensated, or those with a record."""
    if precision not in BLOCK_FORMATS:
        return METHODS_OF[precision]
    compensated = config.rollout.residual_compensation.fraction > 0
    left_out = {name for name in METHODS_OF[precision] if (name.startswith("trace") if compensated else name == "quads")}
    return tuple(name for name in METHODS_OF[precision] if name not in left_out)


def require_measurable(config: Config, plan: Mapping[str, Sequence[str]]) -> None:
    """Raises UserError for a method that was asked for and does not make sense for the config's rollout."""
    for precision, methods in plan.items():
        for name in methods:
            if name not in methods_of(config, precision):
                remedy = (
                    "follows a compensated rollout; add rollout.residual_compensation.fraction=0.5"
                    if name == "quads"
                    else "has a record, which holds no residual; set rollout.residual_compensation.fraction to 0.0"
                )
                raise UserError(f"--methods: {name} {remedy}, or leave it out")


def require_precision(precision: str) -> None:
    """Raises UserError for a precision that does not exist."""
    if precision not in PRECISIONS:
        raise UserError(f"precision {precision!r} is unknown; write one of: {', '.join(PRECISIONS)}")


def precision_config(config: Config, precision: str, method: str) -> Config:
    """The config with the rollout at a precision and the trainer as a method says, at every site.

    Residual compensation stays as the config has it, except where the precision leaves nothing to compensate.

    Raises:
      UserError: there is no such precision, or the method is guided and the rollout compensates residuals.
    """
    require_precision(precision)
    method = "bf16" if precision == "bf16" else method
    # A preset counts on the default sites; the run's own may lack one that the preset guides.
    keys = overlay(METHODS[method], {"guidance": {"sites": list(RECORDED_SITES)}})
    fraction = config.rollout.residual_compensation.fraction if _rounds_inputs(precision) else 0.0
    keys = overlay(keys, {"rollout": {"residual_compensation": {"fraction": fraction}}})
    return from_mapping(overlay(config.model_dump(mode="json"), overlay(keys, PRECISIONS[precision])) | {"method": method})


def _rounds_inputs(precision: str) -> bool:
    """Whether the experts' inputs are in FP4, so that there is something to compensate."""
    return PRECISIONS[precision]["rollout"]["activations"] in BLOCK_FORMATS


def precision_overrides(config: Config, precision: str) -> str:
    """The settings that bring a config's rollout to a precision, as on the command line; empty where it is there already."""
    values, keys = config.model_dump(mode="json"), PRECISIONS[precision]
    formats = "" if overlay(values, keys) == values else " ".join(f"{name}={value}" for name, value in leaves(keys))
    # Another method's preset would switch the compensation off, or take another share.
    fraction = config.rollout.residual_compensation.fraction
    compensated = fraction > 0 and _rounds_inputs(precision)
    return f"{formats} rollout.residual_compensation.fraction={fraction}".lstrip() if compensated else formats


def precision_name(capabilities: Capabilities) -> str:
    """What an engine really executes: `nvfp4` where everything is in one format, otherwise each part with its own."""
    formats = {name: getattr(capabilities, name) for name in ("weights", "activations", "k", "v")}
    for name, keys in PRECISIONS.items():
        wanted = keys["rollout"]
        if formats == {"weights": wanted["weights"], "activations": wanted["activations"], **wanted["kv_cache"]}:
            return name
    return ", ".join(f"{part} {name}" for part, name in formats.items())


def rollout_name(capabilities: Capabilities) -> str:
    """The same with what the engine compensates."""
    share = capabilities.residual_fraction
    compensated = f", residual of {100 * share:g} % of the input channels compensated" if share else ""
    return precision_name(capabilities) + compensated
