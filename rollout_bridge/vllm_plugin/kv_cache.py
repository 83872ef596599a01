"""FP4 keys and values in a cache of the model's own type: rounded to NVFP4 and decoded again before they are stored.

1. vLLM loads `k_scale` and `v_scale`, plain powers of two that its BF16 parameters hold, and throws them away for a cache that is not
   quantized; `CanonicalKVCacheMethod` takes them first.
2. `RoundedCache`, mixed into the implementation of an attention backend that writes through `do_kv_cache_update`, rounds there. That is
   after RoPE, and attention reads from the cache only, so the newest key and value are rounded as well.

Numerics only: no memory is saved. Values on the NVFP4 grid under a power of two are exact in BF16, FP16 apart from its range, and FP32.
Imports vllm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.platforms import current_platform

from rollout_bridge.vllm_plugin.activations import Rounding
from rollout_bridge.vllm_plugin.numerics import NVFP4
from rollout_bridge.vllm_plugin.observing import layer_id
from rollout_bridge.vllm_plugin.settings import current_settings


@dataclass
class KvMultipliers:
    """Decode multipliers of one layer, float32 scalars updated in place; None leaves a side unrounded."""

    k: Tensor | None = None
    v: Tensor | None = None


class CanonicalKVCacheMethod(BaseKVCacheMethod):
    """Loads the multipliers of K and V, and keeps those of the sides that the settings round, as `layer.kv_multipliers`."""

    def __init__(self, quant_config) -> None:
        super().__init__(quant_config)
        self.rounded: tuple[str, ...] | None = None

    def create_weights(self, layer: torch.nn.Module) -> None:
        """The scale parameters.

        Raises:
          ValueError: vLLM chose a quantized cache of its own, because the checkpoint declares FP4 K and V or the user asked for it,
            which would round a second time or, on CPU, read garbage without a word.
        """
        if self.rounded is None:  # vLLM also makes methods, which it does not use, where no settings are to be had
            self.rounded = _rounded_sides()
        _require_plain_cache(layer, self.rounded)
        super().create_weights(layer)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Takes the loaded multipliers before vLLM drops them; those that an update left out stay as they are.

        Raises:
          ValueError: a multiplier was never loaded or is no power of two, or the attention backend does not round.
        """
        rounded = self.rounded or ()
        if rounded and not isinstance(layer.impl, RoundedCache):
            raise ValueError(
                f"{layer.layer_name}: kv_cache {'/'.join(rounded)} nvfp4 needs the attention backend FLASH_ATTN (CPU_ATTN on CPU), and "
                f"{type(layer.impl).__name__} was chosen; pass attention_backend='FLASH_ATTN'"
            )
        kept = getattr(layer, "kv_multipliers", None) or KvMultipliers()
        for side in rounded:
            loaded = getattr(layer, f"{side}_scale", None)
            if loaded is not None and bool(loaded > 0):
                _keep(kept, side, _power_of_two(f"{layer.layer_name}.{side}_scale", loaded.detach().to(torch.float32)))
            elif getattr(kept, side) is None:
                raise ValueError(
                    f"{layer.layer_name}: the checkpoint has no {side}_scale, which kv_cache.{side} nvfp4 needs; "
                    "export with trace-jax, which always writes it, or write bf16"
                )
        layer.kv_multipliers = kept
        super().process_weights_after_loading(layer)


class RoundedCache:
    """Mixed into an attention implementation: what enters the cache is rounded first.

    Raises:
      ValueError: K or V are to be rounded and the checkpoint is none that brings their multipliers.
    """

    rounds_cache = True

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        if _rounded_sides() and getattr(get_current_vllm_config().quant_config, "KVCacheMethodCls", None) is not CanonicalKVCacheMethod:
            raise ValueError(
                f"kv_cache {'/'.join(_rounded_sides())} nvfp4 needs a checkpoint with the multipliers of K and V in ModelOpt's layout; "
                "export with --format nvfp4, or write bf16"
            )

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores key and value [tokens, KV heads, head_dim], blocks along the last axis, as the backend does."""
        multipliers = getattr(layer, "kv_multipliers", None) or KvMultipliers()
        key, value = _rounded(layer, "k", key, multipliers.k), _rounded(layer, "v", value, multipliers.v)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # pyright: ignore[reportAttributeAccessIssue]


def _rounded_sides() -> tuple[str, ...]:
    settings = current_settings()
    return tuple(side for side in "kv" if getattr(settings, side) == "nvfp4")


def _rounded(layer, side: str, x: Tensor, multiplier: Tensor | None) -> Tensor:
    return Rounding(None if multiplier is None else NVFP4, multiplier, site=(side, layer_id(layer.layer_name))).input(x)


def _require_plain_cache(layer, rounded: tuple[str, ...]) -> None:
    if layer.kv_cache_dtype in ("auto", "bfloat16", "float16") or not (rounded or _cannot_read(layer.kv_cache_dtype)):
        return
    raise ValueError(
        f"{layer.layer_name}: kv_cache_dtype is {layer.kv_cache_dtype}, as the checkpoint declares or you asked, and "
        + (f"trace-jax rounds {'/'.join(rounded)} itself" if rounded else "vLLM cannot read such a cache on CPU")
        + "; pass kv_cache_dtype='bfloat16', with additional_config={'trace_jax': {'kv_cache': {'k': 'nvfp4', 'v': 'nvfp4'}}} for FP4"
    )


def _cannot_read(kv_cache_dtype: str) -> bool:
    return current_platform.is_cpu() and not kv_cache_dtype.startswith("fp8")


def _power_of_two(name: str, value: Tensor) -> Tensor:
    if float(torch.frexp(value).mantissa) != 0.5:
        raise ValueError(f"{name} is {float(value)}, no power of two, and BF16 would round it; export with trace-jax")
    return value


def _keep(kept: KvMultipliers, side: str, value: Tensor) -> None:
    known = getattr(kept, side)
    if known is None:
        setattr(kept, side, value.clone())
    else:
        known.copy_(value)
