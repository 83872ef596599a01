"""What an update must consist of, read off the model that vLLM has built. Imports vllm."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from rollout_bridge.vllm_plugin.weights.expected import ModelLayout

MODEL_TYPE = "qwen3_moe"


def model_layout(vllm_config: Any, model: torch.nn.Module) -> ModelLayout:
    """The layout of an engine's model.

    Raises:
      NotImplementedError: another family of models, or a model divided between workers.
    """
    config = vllm_config.model_config.hf_text_config
    if config.model_type != MODEL_TYPE:
        raise NotImplementedError(f"weight updates of a {config.model_type} model; {MODEL_TYPE} is what can be updated")
    if vllm_config.parallel_config.world_size > 1:
        raise NotImplementedError("weight updates of a model divided between workers; run vLLM with one worker")
    experts = [module for module in model.modules() if hasattr(module, "w13_weight")]
    kv_cache = (vllm_config.additional_config or {}).get("trace_jax", {}).get("kv_cache", {})
    return ModelLayout(
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        expert_hidden_size=config.moe_intermediate_size,
        quantized=tuple(module.w13_weight.dtype == torch.uint8 for module in experts),
        input_scales=not any(getattr(module.quant_method, "use_a16", False) for module in experts),
        kv_scales=any(isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod) for module in model.modules()),
        required_kv=tuple(site for site in ("k", "v") if kv_cache.get(site) == "nvfp4"),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bool(getattr(config, "attention_bias", False)),
    )
