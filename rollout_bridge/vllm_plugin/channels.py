"""Which input channels of the quantized products are compensated: none, all, or those that a calibration chose.

The choice is made once and kept. One that followed the batch would make a token's output depend on its neighbours.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.activations import Rounding
from rollout_bridge.vllm_plugin.numerics import BlockFormat, largest_channels
from rollout_bridge.vllm_plugin.observing import layer_id


class Channels:
    """The choice for one product.

    Args:
      fraction: share of the channels, 0 to 1.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.fmt: BlockFormat | None = None
        self.chosen: Tensor | None = None
        self.energy: Tensor | None = None
        self.measuring = False

    def rounding(
        self, size: int, device: torch.device, fmt: BlockFormat | None, multiplier: Tensor | None, site: tuple[str, int] | None = None
    ) -> Rounding:
        """How to round an input of `size` channels now; the rest as in `Rounding`.

        Raises:
          RuntimeError: some channels are to be compensated and no calibration has chosen them.
        """
        self.fmt = fmt
        if fmt is None or self.fraction == 0:
            return Rounding(fmt, multiplier, site=site)
        if self.measuring:
            if self.energy is None:
                self.energy = torch.zeros(size, dtype=torch.float64, device=device)
            return Rounding(fmt, multiplier, energy=self.energy, site=site)
        if self.chosen is None and self.fraction == 1:
            self.chosen = torch.arange(size, device=device)
        if self.chosen is None and _serving():
            raise RuntimeError(
                f"residual_compensation.fraction is {self.fraction} and no channels are chosen; "
                "call rollout_bridge.vllm_plugin.channels.calibrate with prompts first, or write 1.0"
            )
        return Rounding(fmt, multiplier, channels=self.chosen, site=site)


def calibrate(llm: Any, prompts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """Chooses the channels of every product with the largest residuals over some prompts, and keeps them; returns `chosen_channels`.

    Args:
      llm: a vllm.LLM with this plugin.
      prompts: token ids; the products they run through are not compensated.

    Raises:
      RuntimeError: a product saw no token.
    """
    from vllm import SamplingParams

    llm.apply_model(_start)
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
    llm.apply_model(_finish)
    return chosen_channels(llm)


def chosen_channels(llm: Any) -> dict[str, list[int]]:
    """Channels of every compensated product by its name, as `set_channels` takes them."""
    return llm.apply_model(_chosen)[0]


def set_channels(llm: Any, channels: Mapping[str, Sequence[int]]) -> None:
    """Sets the choice that another engine, or an earlier start of this one, made.

    Raises:
      ValueError: the products are not those of this model.
    """
    llm.apply_model(_Setter({name: list(ids) for name, ids in channels.items()}))


def set_site_channels(llm: Any, channels: Mapping[str, Sequence[Sequence[int]]]) -> None:
    """Sets the trainer's choice: site -> the channels of each layer."""
    names = llm.apply_model(_names)[0]
    set_channels(llm, {name: channels[name.rpartition(".")[2]][layer_id(name)] for name in names})


def choices(model: torch.nn.Module) -> dict[str, Channels]:
    """The choices of a model's quantized products by name, such as `model.layers.0.mlp.experts.routed_experts.down_input`."""
    found = {}
    for name, layer in model.named_modules():
        method = getattr(layer, "quant_method", None)
        owner = getattr(method, "kernel", None) or method
        found |= {f"{name}.{site}": choice for site, choice in getattr(owner, "channels", {}).items()}
    return found


class _Setter:
    """A function with its argument, which vLLM can send to a worker."""

    def __init__(self, channels: dict[str, list[int]]) -> None:
        self.channels = channels

    def __call__(self, model: torch.nn.Module) -> None:
        found = choices(model)
        if found.keys() != self.channels.keys():
            different = sorted(found.keys() ^ self.channels.keys())
            raise ValueError(f"the chosen channels are those of another model: {different[0]} is in one of the two only; calibrate anew")
        device = next(model.parameters()).device
        for name, choice in found.items():
            choice.chosen = torch.tensor(self.channels[name], dtype=torch.int64, device=device)


def _start(model: torch.nn.Module) -> None:
    for choice in choices(model).values():
        choice.chosen, choice.energy, choice.measuring = None, None, True


def _finish(model: torch.nn.Module) -> None:
    for name, choice in choices(model).items():
        choice.measuring = False
        if choice.fraction == 0:
            continue
        if choice.energy is None or choice.fmt is None:
            raise RuntimeError(f"{name} saw no token of the calibration prompts; give more of them")
        choice.chosen, choice.energy = largest_channels(choice.energy, choice.fraction, choice.fmt), None


def _chosen(model: torch.nn.Module) -> dict[str, list[int]]:
    return {name: choice.chosen.tolist() for name, choice in choices(model).items() if choice.chosen is not None}


def _names(model: torch.nn.Module) -> list[str]:
    return list(choices(model))


def _serving() -> bool:
    """Whether this is a pass over requests, and not one of the passes with which vLLM measures memory and warms up."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    return is_forward_context_available() and get_forward_context().attn_metadata is not None
