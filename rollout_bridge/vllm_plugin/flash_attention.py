"""FlashAttention with rounded keys and values, for NVIDIA GPUs without native FP4. Written against vLLM's source and not run yet."""

from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from rollout_bridge.vllm_plugin.kv_cache import RoundedCache


class RoundedFlashAttention(RoundedCache, FlashAttentionImpl):
    """FLASH_ATTN that stores what `RoundedCache` makes of K and V."""


class RoundedFlashBackend(FlashAttentionBackend):
    """The backend of that implementation."""

    @staticmethod
    def get_impl_cls() -> type[RoundedFlashAttention]:
        """The implementation."""
        return RoundedFlashAttention
