"""The entry point of vLLM's group `vllm.general_plugins`. vLLM calls it in every process that it starts, some more than once."""

import functools

QUANTIZATION = "modelopt_fp4"
"""vLLM's name for ModelOpt's NVFP4 checkpoints, which this plugin serves where vLLM cannot."""


@functools.cache
def register() -> None:
    """On CPU: NVFP4 checkpoints in the ModelOpt layout load and run with emulated W4A4. Elsewhere vLLM's own paths stay as they are."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from rollout_bridge.vllm_plugin.cpu import CanonicalModelOptNvFp4Config, CanonicalNvFp4LinearKernel

    register_linear_kernel(CanonicalNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    register_quantization_config(QUANTIZATION)(CanonicalModelOptNvFp4Config)
