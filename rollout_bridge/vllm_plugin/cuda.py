"""ModelOpt's NVFP4 configuration on NVIDIA GPUs: vLLM's own, with K and V rounded as the settings say. Not run yet.

On Hopper that is FP4 K and V with FLASH_ATTN, which has no FP4 cache of its own. W4A4 there needs vLLM's `--linear-backend emulation
--moe-backend emulation`; without them it runs W4A16, and `capabilities` says so. Imports vllm.
"""

from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from rollout_bridge.vllm_plugin.kv_cache import CanonicalKVCacheMethod


class RoundedCacheModelOptNvFp4Config(ModelOptNvFp4Config):
    """ModelOpt's NVFP4 configuration with the multipliers of K and V kept."""

    KVCacheMethodCls = CanonicalKVCacheMethod
