"""What capture and replay need of vLLM's model runner: settings under which no row is lost, the forward pass, and the routers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rollout_bridge.vllm_plugin.capture.requests import RequestRows, Rows


class WrappedForward:
    """Runs every forward of a model runner inside a context that knows its rows.

    Args:
      runner: vLLM's model runner.
      around: makes the context of a forward from its rows.
    """

    def __init__(self, runner: Any, around: Callable[[Rows], AbstractContextManager[None]]):
        self._runner = runner
        self._around = around
        self._requests = RequestRows()
        self._forward = runner._model_forward
        runner._model_forward = self._run

    def close(self) -> None:
        """Leaves the runner as it was."""
        del self._runner._model_forward

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        runner, batch = self._runner, self._runner.input_batch
        count = batch.num_reqs
        extra_args = {name: state.sampling_params and state.sampling_params.extra_args for name, state in runner.requests.items()}
        bounds, starts = runner.query_start_loc.np[: count + 1], batch.num_computed_tokens_cpu[:count]
        with self._around(self._requests.forward(batch.req_ids[:count], starts, bounds, extra_args)):
            return self._forward(*args, **kwargs)


def check_worker(worker: Any) -> None:
    """Refuses a worker in which rows would be lost or mistaken.

    Raises:
      ValueError: settings to change.
      NotImplementedError: what capture does not know.
    """
    from vllm.config import CompilationMode

    config = worker.vllm_config
    if config.compilation_config.mode != CompilationMode.NONE or not config.model_config.enforce_eager:
        raise ValueError("capture needs an engine without compilation and graphs; start vLLM with enforce_eager=True")
    if config.cache_config.enable_prefix_caching:
        raise ValueError("capture needs every prompt to be computed; start vLLM with enable_prefix_caching=False")
    if config.scheduler_config.async_scheduling:
        raise ValueError("capture was not tried with asynchronous scheduling; start vLLM with async_scheduling=False")
    if config.speculative_config is not None:
        raise NotImplementedError("capture with speculative decoding: rejected drafts would be recorded; start vLLM without it")
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise NotImplementedError("capture with pipeline or data parallelism; use an engine for each data shard, and tensor parallelism")
    if not hasattr(worker.model_runner, "_model_forward"):
        raise NotImplementedError("capture knows vLLM's first model runner; set VLLM_USE_V2_MODEL_RUNNER=0")


def expert_blocks(runner: Any) -> dict[int, Any]:
    """The expert blocks (`MoERunner`) of the model by global layer id."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return {module.layer_id: module for module in runner.model.modules() if isinstance(module, MoERunner)}


def routers(runner: Any) -> dict[int, Any]:
    """The routers of the expert blocks.

    Raises:
      NotImplementedError: a block's kernel routes by itself.
      ValueError: vLLM captures the routes already.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    blocks = expert_blocks(runner)
    for block in blocks.values():
        if block._quant_method.is_monolithic or not isinstance(block.router, BaseRouter):
            raise NotImplementedError(f"{block.layer_name}: its kernel routes by itself; serve with --moe-backend emulation")
        if block.router.capture_fn is not None:
            raise ValueError(f"{block.layer_name}: its routes are captured by vLLM; start vLLM without enable_return_routed_experts")
    return {layer: block.router for layer, block in blocks.items()}


def attention_layers(runner: Any) -> dict[int, Any]:
    """The attention layers with a KV cache by global layer id."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.models.utils import extract_layer_index

    modules = [module for module in runner.model.modules() if isinstance(module, Attention)]
    return {extract_layer_index(module.layer_name): module for module in modules}
