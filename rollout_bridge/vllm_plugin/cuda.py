"""ModelOpt's NVFP4 configuration on NVIDIA GPUs with FP4 tensor cores: vLLM's own, with K and V rounded as the settings say. Not run yet.

Imports vllm.
"""

from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

from rollout_bridge.vllm_plugin.kv_cache import CanonicalKVCacheMethod


class RoundedCacheModelOptNvFp4Config(ModelOptNvFp4Config):
    """ModelOpt's NVFP4 configuration with the multipliers of K and V kept."""

    KVCacheMethodCls = CanonicalKVCacheMethod
