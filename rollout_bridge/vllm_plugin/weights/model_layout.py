"""What an update must consist of, read off the model that vLLM has built. Imports vllm."""

from typing import Any

import torch
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from rollout_bridge.vllm_plugin.settings import settings_of
from rollout_bridge.vllm_plugin.weights.expected import Experts, ModelLayout

MODEL_TYPE = "qwen3_moe"

PACKED = "_packed"
"""What compressed-tensors adds to the name of weights that hold several values in a byte."""


def model_layout(vllm_config: Any, model: torch.nn.Module) -> ModelLayout:
    """The layout of an engine's model.

    Raises:
      NotImplementedError: another family of models, or one whose layers or experts are divided between workers.
    """
    config = vllm_config.model_config.hf_text_config
    if config.model_type != MODEL_TYPE:
        raise NotImplementedError(f"weight updates of a {config.model_type} model; {MODEL_TYPE} is what can be updated")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1 or parallel.enable_expert_parallel:
        raise NotImplementedError("weight updates of layers or experts divided between workers; run vLLM with tensor parallelism only")
    blocks = [module for module in model.modules() if is_expert_block(module)]
    settings = settings_of(vllm_config)
    return ModelLayout(
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        expert_hidden_size=config.moe_intermediate_size,
        experts=tuple(_experts(module) for module in blocks),
        input_scales=not any(getattr(module.quant_method, "use_a16", False) for module in blocks),
        kv_scales=any(isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod) for module in model.modules()),
        required_kv=tuple(side for side in "kv" if getattr(settings, side) == "nvfp4"),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bool(getattr(config, "attention_bias", False)),
    )


def is_expert_block(module: torch.nn.Module) -> bool:
    """Whether a module holds the stacked experts of a layer."""
    return hasattr(module, "w13_weight") or hasattr(module, "w13_weight" + PACKED)


def _experts(block: torch.nn.Module) -> Experts:
    """What the experts of a layer are, by the parameters that vLLM made for them."""
    if hasattr(block, "w13_weight" + PACKED):
        return "mxfp4"
    return "nvfp4" if block.w13_weight.dtype == torch.uint8 else "plain"
