"""What a user asks of the plugin, as JSON in vLLM's `additional_config["trace_jax"]`.

    {"kv_cache": {"k": "nvfp4", "v": "nvfp4"}, "residual_compensation": {"fraction": 0.5, "selection": "l2"}}

Whatever is missing is off. Weights and activations of the experts are those of the checkpoint and are not asked for here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "trace_jax"
KV_FORMATS = ("bf16", "nvfp4")
_KEYS = {"kv_cache": ("k", "v"), "residual_compensation": ("fraction", "selection")}


@dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    Args:
      k, v: `nvfp4` rounds keys (after RoPE) and values to NVFP4 before they enter the cache; `bf16` leaves them.
      residual_fraction: share of the input channels of quantized products whose rounding error is compensated, 0 to 1.
    """

    k: str = "bf16"
    v: str = "bf16"
    residual_fraction: float = 0.0


def parse_settings(value: Any) -> Settings:
    """Settings from the JSON of `additional_config["trace_jax"]`; None is all off.

    Raises:
      ValueError: an unknown key or value; the line names it and what may be written.
    """
    sections = _section(KEY, value, tuple(_KEYS))
    cache, residual = (_section(f"{KEY}.{name}", sections.get(name), keys) for name, keys in _KEYS.items())
    sides = {side: cache.get(side, "bf16") for side in "kv"}
    for side, name in sides.items():
        if name not in KV_FORMATS:
            raise ValueError(f"{KEY}.kv_cache.{side} is {name!r}; write one of {', '.join(KV_FORMATS)}")
    fraction, selection = residual.get("fraction", 0.0), residual.get("selection", "l2")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise ValueError(f"{KEY}.residual_compensation.fraction is {fraction!r}; write a number from 0 to 1")
    if selection != "l2":
        raise ValueError(f"{KEY}.residual_compensation.selection is {selection!r}; write 'l2'")
    return Settings(**sides, residual_fraction=float(fraction))


def settings_of(vllm_config: Any) -> Settings:
    """The settings of an engine with this configuration."""
    return parse_settings((vllm_config.additional_config or {}).get(KEY))


def current_settings() -> Settings:
    """The settings of the engine that vLLM is building in this thread."""
    from vllm.config import get_current_vllm_config

    return settings_of(get_current_vllm_config())


def _section(name: str, value: Any, keys: tuple[str, ...]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {value!r}; write an object with the keys {', '.join(keys)}")
    unknown = [key for key in value if key not in keys]
    if unknown:
        raise ValueError(f"{name} has no key {unknown[0]!r}; the keys are {', '.join(keys)}")
    return value
