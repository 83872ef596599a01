"""FlashAttention with rounded keys and values, for NVIDIA GPUs without native FP4.

In float32, which its kernels do not take, the attention is the trainer's (`plain_attention`), for comparisons. vLLM imports this module by
name once `plugin.register` has named it.
"""

from typing import ClassVar

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder

from rollout_bridge.vllm_plugin.kv_cache import RoundedCache
from rollout_bridge.vllm_plugin.plain_attention import PlainAttention, without_options


class RoundedFlashAttention(RoundedCache, PlainAttention, FlashAttentionImpl):
    """FLASH_ATTN that stores what `RoundedCache` makes of K and V."""

    def plain(self, dtype: torch.dtype) -> bool:
        """In float32. Raises NotImplementedError for options that only vLLM's kernels have."""
        if dtype == torch.float32 and not without_options(self):
            raise NotImplementedError("attention in float32 with windows, sinks, soft caps or biases; use bfloat16")
        return dtype == torch.float32


class RoundedFlashBuilder(FlashAttentionMetadataBuilder):
    """vLLM's builder, which in float32 asks no kernel for its schedule."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.aot_schedule = self.aot_schedule and self.kv_cache_dtype != torch.float32


class RoundedFlashBackend(FlashAttentionBackend):
    """The backend of that implementation."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_impl_cls() -> type[RoundedFlashAttention]:
        """The implementation."""
        return RoundedFlashAttention

    @staticmethod
    def get_builder_cls() -> type[RoundedFlashBuilder]:
        """The builder of its metadata."""
        return RoundedFlashBuilder
