"""The tensors of an update under the names that vLLM's loader takes: one tensor per expert, as in a checkpoint."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.weights.expected import ModelLayout

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(.+)")
_SHARED_SCALES = {"input_scale": ("gate_proj", "up_proj"), "down_proj.input_scale": ("down_proj",)}
"""Activation scale of a layer -> the projections of every expert that read it."""


def loader_tensors(tensors: dict[str, Tensor], layout: ModelLayout) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors for `load_weights`, in the order of arrival; empties `tensors` on the way, so that memory becomes free.

    A tied head is loaded as well: vLLM may keep a packed copy of it.
    """
    while tensors:
        name = next(iter(tensors))
        tensor = tensors.pop(name)
        stacked = _EXPERTS.fullmatch(name)
        if stacked is None:
            yield name, tensor
            if name == EMBEDDING and layout.tied:
                yield HEAD, tensor
            continue
        prefix, part = stacked.groups()
        if part in _SHARED_SCALES:
            for expert in range(layout.num_experts):
                for projection in _SHARED_SCALES[part]:
                    yield f"{prefix}.{expert}.{projection}.input_scale", tensor
            continue
        if part.endswith(".weight_scale"):
            tensor = tensor.view(torch.float8_e4m3fn)
        for expert in range(layout.num_experts):
            yield f"{prefix}.{expert}.{part}", tensor[expert]
