"""The entry point of vLLM's group `vllm.general_plugins`. vLLM calls it in every process that it starts, some more than once."""

import functools

from rollout_bridge.vllm_plugin.weights.update import BACKEND

QUANTIZATION = "modelopt_fp4"
"""vLLM's name for ModelOpt's NVFP4 checkpoints, which this plugin serves where vLLM cannot."""


@functools.cache
def register() -> None:
    """Weight updates through a ring; on CPU NVFP4 checkpoints in the ModelOpt layout, which load and run with emulated W4A4.

    Elsewhere vLLM's own paths stay as they are.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine(BACKEND, "rollout_bridge.vllm_plugin.weights.transfer_engine", "RingWeightTransferEngine")
    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum

    from rollout_bridge.vllm_plugin.cpu import CanonicalModelOptNvFp4Config, CanonicalNvFp4LinearKernel

    register_linear_kernel(CanonicalNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    register_quantization_config(QUANTIZATION)(CanonicalModelOptNvFp4Config)
