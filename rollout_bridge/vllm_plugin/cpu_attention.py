"""Attention on CPU in the trainer's order of rounding, over rounded keys and values.

vLLM imports this module by name once `plugin.register` has named it.
"""

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from rollout_bridge.vllm_plugin.kv_cache import RoundedCache
from rollout_bridge.vllm_plugin.plain_attention import PlainAttention, without_options


class RoundedCpuAttention(RoundedCache, PlainAttention, CPUAttentionBackendImpl):
    """The implementation: what `RoundedCache` makes of K and V is stored, and read by `PlainAttention`."""

    def plain(self, dtype: torch.dtype) -> bool:
        """Every layer without further options."""
        return without_options(self)


class RoundedCpuBackend(CPUAttentionBackend):
    """The backend of that implementation."""

    @staticmethod
    def get_impl_cls() -> type[RoundedCpuAttention]:
        """The implementation."""
        return RoundedCpuAttention
