"""Shape and constants of a Qwen3.5-MoE decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.errors import UserError
from trace_jax.models.decoder_config import LayerGroup, MoeConfig

LINEAR, FULL = "linear", "full"
"""Kinds of layers: gated delta-net, and attention over a cache."""


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(MoeConfig):
    """Hyper-parameters of a Qwen3.5-MoE decoder beside those that every family has; all layers have experts.

    Args:
      full_attention_interval: every so many layers, the last one has attention; the others are delta-nets.
      rotary_dim: entries of every attention head that are rotated; even.
      shared_hidden_size: hidden width of the expert that every token uses.
      linear_key_heads, linear_value_heads: heads of the delta-nets; the first divides the second.
      linear_key_dim, linear_value_dim: their widths.
      convolution_taps: tokens that the convolution before a delta-net sees.

    Raises:
      UserError: also if the heads do not divide, or `rotary_dim` is odd or wider than a head.
    """

    FAMILY = "qwen3_5_moe"
    MODEL_TYPE = "qwen3_5_moe_text"
    NORM_OFFSET = 1.0

    rotary_dim: int
    shared_hidden_size: int
    linear_key_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    full_attention_interval: int = 4
    convolution_taps: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_value_heads % self.linear_key_heads:
            raise UserError(
                f"model.config.linear_key_heads={self.linear_key_heads} must divide linear_value_heads={self.linear_value_heads}"
            )
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserError(f"model.config.rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}")

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Delta-nets and one layer of attention in turn; what is left over has delta-nets only."""
        patterns, rest = divmod(self.num_layers, self.full_attention_interval)
        found = (LayerGroup((LINEAR,) * (self.full_attention_interval - 1) + (FULL,), patterns), LayerGroup((LINEAR,), rest))
        return tuple(group for group in found if group.count)

    def sites_of(self, kind: str) -> tuple[str, ...]:
        """The experts' inputs everywhere, keys and values where there is attention."""
        return ("expert_input", "down_input", "k", "v") if kind == FULL else ("expert_input", "down_input")

    @property
    def recurrent_layer_ids(self) -> tuple[int, ...]:
        """The delta-nets."""
        return tuple(sorted(layer for stack in self.stacks if stack.kind == LINEAR for layer in stack.layer_ids))

    @property
    def recurrent_shape(self) -> tuple[int, int, int, int, int]:
        """State and convolution of a delta-net."""
        return self.linear_value_heads, self.linear_key_dim, self.linear_value_dim, self.convolution_taps - 1, self.convolution_channels

    @property
    def convolution_channels(self) -> int:
        """Queries, keys and values of a delta-net together."""
        return 2 * self.linear_key_heads * self.linear_key_dim + self.linear_value_width

    @property
    def linear_value_width(self) -> int:
        """All values of a delta-net together."""
        return self.linear_value_heads * self.linear_value_dim
