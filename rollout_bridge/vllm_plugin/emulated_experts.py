"""What the emulated expert methods of the two checkpoint layouts have in common. Imports vllm."""

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.channels import Channels
from rollout_bridge.vllm_plugin.experts import apply_experts
from rollout_bridge.vllm_plugin.numerics import BlockFormat, Quantized
from rollout_bridge.vllm_plugin.observing import layer_id
from rollout_bridge.vllm_plugin.settings import current_settings
from rollout_bridge.vllm_plugin.workers import rank_and_size


class EmulatedExperts:
    """Mixed into vLLM's expert methods.

    Attributes:
      use_a16: whether the checkpoint leaves activations unrounded.
      channels: site -> which channels are compensated.
    """

    def choose(self, fmt: BlockFormat, use_a16: bool) -> None:
        """Takes the checkpoint's formats and the user's settings.

        Raises:
          ValueError: compensation of activations that are not rounded, or with several workers.
        """
        fraction = current_settings().residual_fraction
        if fraction > 0 and rank_and_size()[1] > 1:
            raise ValueError(
                f"residual_compensation.fraction is {fraction} with several tensor-parallel workers, in two of which blocks of the chosen "
                "channels would lie; write 0.0, or use one worker"
            )
        if use_a16 and fraction > 0:
            raise ValueError(
                f"residual_compensation.fraction is {fraction} and the checkpoint leaves activations unrounded (W4A16); write 0.0, "
                "or export without --activations bf16"
            )
        self.fmt, self.use_a16 = fmt, use_a16
        self.channels = {site: Channels(fraction) for site in ("expert_input", "down_input")}

    def maybe_make_prepare_finalize(self, routing_tables=None) -> None:
        """None: vLLM 0.26 asks a method without a kernel for what would surround one."""

    def require_simple(self, layer) -> None:
        """Raises NotImplementedError for whole experts divided between workers, blocks that lie in two, or another activation than silu."""
        activation = getattr(layer.activation, "value", layer.activation)
        if layer.expert_map is not None or activation != "silu":
            raise NotImplementedError(
                f"emulated FP4 experts with activation {activation!r} or expert parallelism; serve silu experts on one worker"
            )
        hidden = layer.moe_config.intermediate_size_per_partition
        if hidden % self.fmt.block:
            raise NotImplementedError(f"{hidden} hidden values of an expert in each worker, blocks of {self.fmt.block}; use fewer workers")

    def packed(self, codes: Tensor, scales: Tensor, multiplier: Tensor | None) -> Quantized:
        """Stacked experts [E, out, in], with a multiplier [E] for each or none."""
        rows = None if multiplier is None else multiplier[:, None]
        return Quantized(codes, scales.view(torch.uint8), rows, 2 * codes.shape[-1], self.fmt)

    def emulate(self, layer, x: Tensor, routes: tuple[Tensor, Tensor], gate_up: Quantized, down: Quantized, multipliers: tuple) -> Tensor:
        """The routed experts' sum for x[N, D]; routes are (ids, mixing), multipliers those of expert input and down input."""
        fmt = None if self.use_a16 else self.fmt
        sites = {"expert_input": (gate_up.size, multipliers[0]), "down_input": (down.size, multipliers[1])}
        layer_number = layer_id(layer.layer_name)
        roundings = [
            self.channels[site].rounding(
                size, x.device, fmt, multiplier, ("expert_input", layer_number) if site == "expert_input" else None
            )
            for site, (size, multiplier) in sites.items()
        ]
        return apply_experts(x, *routes, gate_up, down, *roundings)
