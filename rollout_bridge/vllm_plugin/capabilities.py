"""What an engine really executes, read from the layers it built and not from what was asked for."""

from typing import Any

from rollout_bridge.vllm_plugin.workers import agreed

PLAIN_CACHES = ("auto", "bfloat16", "float16")
WEIGHT_ONLY_BACKENDS = ("MARLIN", "HUMMING", "W4A16")
"""Parts of the names of vLLM's kernels that do not round activations, whatever the checkpoint says."""


def capabilities(llm: Any) -> dict[str, Any]:
    """The formats in use.

    Args:
      llm: a vllm.LLM.

    Returns:
      weights, activations, k, v, query: `bf16` (the compute dtype, whatever it is), `fp8`, `nvfp4` or vLLM's own word; of weights and
      activations those of the routed experts. compute_dtype, quantized_layers (numbers), residual_fraction, and backend, in words.
    """
    return agreed(llm.apply_model(executed), "what they execute")


def executed(model: Any) -> dict[str, Any]:
    """The same of a model; a function that vLLM can send to a worker."""
    layers = [(name, layer, getattr(layer, "quant_method", None)) for name, layer in model.named_modules()]
    quantized = [(name, method) for name, layer, method in layers if hasattr(layer, "w13_weight_scale")]
    attention = [layer for _, layer, _ in layers if hasattr(layer, "kv_cache_dtype") and hasattr(layer, "impl")]
    weights, activations, how = _experts([method for _, method in quantized])
    cache = _cache(attention[0])
    fraction = max([choice.fraction for _, method in quantized for choice in getattr(method, "channels", {}).values()], default=0.0)
    if fraction > 0:
        how += f", residual of {100 * fraction:g} % of the input channels compensated"
    return {
        "weights": weights,
        "activations": activations,
        **cache,
        "compute_dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "quantized_layers": sorted({_number(name) for name, _ in quantized}),
        "residual_fraction": fraction,
        "backend": f"experts: {how}; attention: {_attention_name(attention[0])}",
    }


def _experts(methods: list[Any]) -> tuple[str, str, str]:
    """(weights, activations, how) of the quantized experts."""
    if not methods:
        return "bf16", "bf16", "vLLM's, unquantized"
    method = methods[0]
    weights = "mxfp4" if "mxfp4" in type(method).__name__.lower() else "nvfp4"
    backend = getattr(method, f"{weights}_backend", None)
    if backend is None:
        return weights, "bf16" if method.use_a16 else weights, "emulated by trace-jax: operands decoded, float32 accumulation"
    name = str(getattr(backend, "name", backend)).upper()
    weight_only = getattr(method, "use_a16", False) or any(part in name for part in WEIGHT_ONLY_BACKENDS)
    if getattr(method, "use_cutlass_mxfp4", False):
        name, weight_only = "CUTLASS", False
    return weights, "bf16" if weight_only else weights, f"vLLM's {name}"


def _cache(layer: Any) -> dict[str, str]:
    """Formats of K, V and of the query that meets them."""
    kept, dtype = getattr(layer, "kv_multipliers", None), layer.kv_cache_dtype
    if dtype in PLAIN_CACHES:
        sides = {side: "bf16" if getattr(kept, side, None) is None else "nvfp4" for side in "kv"}
        return {**sides, "query": "bf16"}
    native_fp4 = dtype.startswith("nvfp4")
    word = "nvfp4" if native_fp4 else "fp8" if dtype.startswith("fp8") else dtype
    return {"k": word, "v": word, "query": "fp8" if native_fp4 and _blackwell() or word == "fp8" else "bf16"}


def _blackwell() -> bool:
    """SM100 and its family, whose FP4 cache is read by a kernel that takes the query in FP8."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and current_platform.is_device_capability_family(100))


def _attention_name(layer: Any) -> str:
    name = type(layer.impl).__name__
    kept = getattr(layer, "kv_multipliers", None)
    rounds = hasattr(layer.impl, "rounds_cache") and kept is not None and (kept.k is not None or kept.v is not None)
    return f"{name}, K and V rounded before they are stored" if rounds else name


def _number(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1])
