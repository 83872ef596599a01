"""The entry point of vLLM's group `vllm.general_plugins`. vLLM calls it in every process that it starts, some more than once."""

import functools

from rollout_bridge.vllm_plugin.weights.update import BACKEND

QUANTIZATION = "modelopt_fp4"
"""vLLM's name for ModelOpt's NVFP4 checkpoints, which this plugin serves where vLLM cannot."""

PACKAGE = "rollout_bridge.vllm_plugin"

NATIVE_FP4 = 100
"""Compute capability, times ten, from which NVIDIA GPUs have FP4 tensor cores."""


@functools.cache
def register() -> None:
    """Weight updates through a ring, and trace-jax's numerics in vLLM.

    On CPU and on NVIDIA GPUs without FP4 tensor cores: NVFP4 checkpoints in the ModelOpt layout, and MXFP4 ones in that of
    compressed-tensors, load and run with emulated W4A4 or W4A16, K and V are rounded as the settings say, and the layers between round in
    the trainer's order. On GPUs with FP4 tensor cores only K and V are: weights and activations are vLLM's own affair.

    Raises:
      RuntimeError: a vLLM of another version than the plugin knows.
    """
    from rollout_bridge.vllm_plugin.versions import require_supported

    require_supported()
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine(BACKEND, "rollout_bridge.vllm_plugin.weights.transfer_engine", "RingWeightTransferEngine")
    if current_platform.is_cpu():
        _register_cpu()
    elif current_platform.is_cuda():
        _register_cuda()


def _register_cpu() -> None:
    _emulate()
    _register_attention("CPU_ATTN", "cpu_attention.RoundedCpuBackend")


def _register_cuda() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform

    if current_platform.has_device_capability(NATIVE_FP4):
        from rollout_bridge.vllm_plugin.cuda import RoundedCacheModelOptNvFp4Config

        register_quantization_config(QUANTIZATION)(RoundedCacheModelOptNvFp4Config)
    else:
        from rollout_bridge.vllm_plugin import reference_router  # noqa: F401  importing it registers its layer

        _emulate()
    _register_attention("FLASH_ATTN", "flash_attention.RoundedFlashBackend")


def _emulate() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from rollout_bridge.vllm_plugin import output_bias, reference_layers  # noqa: F401  importing them registers their layers
    from rollout_bridge.vllm_plugin.mxfp4 import CanonicalCompressedTensorsConfig
    from rollout_bridge.vllm_plugin.nvfp4 import CanonicalModelOptNvFp4Config, use_canonical_linears

    use_canonical_linears()
    register_quantization_config(QUANTIZATION)(CanonicalModelOptNvFp4Config)
    register_quantization_config("compressed-tensors")(CanonicalCompressedTensorsConfig)


def _register_attention(name: str, backend: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[name], f"{PACKAGE}.{backend}")
