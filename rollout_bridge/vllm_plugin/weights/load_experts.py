"""Stacked experts into vLLM's parameters, all experts of a layer in one call. Imports vllm.

vLLM's loader of checkpoints takes one expert after the other, twelve tensors each, and keeps account of every call. Its function for a
single parameter also takes weights and block scales of all experts; for the scalars of experts there is one here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from vllm.model_executor.model_loader.reload.layerwise import make_online_process_loader

from rollout_bridge.vllm_plugin.observing import layer_id
from rollout_bridge.vllm_plugin.weights.model_layout import PACKED, is_expert_block
from rollout_bridge.vllm_plugin.weights.targets import Tensors, expert_targets

_SCALARS = ("weight_scale_2", "input_scale")


def load_experts(model: torch.nn.Module, tensors: Tensors) -> None:
    """Loads stacked tensors and takes them out of `tensors`, so that memory becomes free.

    Args:
      model: between vLLM's `initialize_layerwise_reload` and `finalize_layerwise_reload`, in `stacked_scalars`.
      tensors: of the experts only, by their names in an update.
    """
    layers = _layers(model)
    while len(tensors):
        name = next(iter(tensors))
        tensor = tensors.pop(name)
        for layer, parameter, part in expert_targets(name):
            parameter += PACKED * hasattr(layers[layer], parameter + PACKED)
            target = getattr(layers[layer], parameter)
            if target.dtype == torch.float8_e4m3fn:
                tensor = tensor.view(target.dtype)
            target.weight_loader(target, tensor, weight_name=parameter, shard_id=part, expert_id=0, return_success=True)


@contextmanager
def stacked_scalars(model: torch.nn.Module) -> Iterator[None]:
    """Lets the parameters that hold scalars of experts take those of all experts at once, until the block ends.

    Both `load_experts` and `finalize_layerwise_reload` belong into the block: vLLM keeps the tensors of a layer back until the last one has
    come, and where activations are not rounded the input scales, for which it has parameters, never come.
    """
    replaced = []
    for layer in _layers(model).values():
        for name, parameter in layer.named_parameters(recurse=False):
            if name.endswith(_SCALARS):
                replaced.append((parameter, parameter.weight_loader))
                parameter.weight_loader = _load_scalars
                parameter.weight_loader = make_online_process_loader(layer, name)
    try:
        yield
    finally:
        # vLLM starts its next update from these same objects.
        for parameter, loader in replaced:
            parameter.weight_loader = loader


def _layers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    return {layer_id(module.layer_name): module for module in model.modules() if is_expert_block(module)}


def _load_scalars(param, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int, return_success: bool) -> bool:
    """One scalar for each expert, or the same for all, into [E] or, for gate and up, a column of [E, 2]."""
    target = param.data if param.data.ndim == 1 else param.data[:, ("w1", "w3").index(shard_id)]
    target.copy_(loaded_weight.expand(target.shape))
    return return_success
