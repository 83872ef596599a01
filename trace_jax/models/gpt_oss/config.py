"""Shape and constants of a gpt-oss decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.layers.rope import RopeScaling
from trace_jax.models.decoder_config import LayerGroup, MoeConfig

SLIDING, FULL = "sliding", "full"
"""Kinds of layers: those whose queries see a window, and those whose queries see everything."""


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(MoeConfig):
    """Hyper-parameters of a gpt-oss decoder beside those that every family has; all layers have experts, every other one a window.

    Args:
      sliding_window: tokens that a query of the first, third, ... layer sees, itself included.
      swiglu_alpha, swiglu_limit: of the clamped gate.
      rope_scaling: `yarn`, or None.
    """

    FAMILY = "gpt_oss"

    sliding_window: int
    rope_theta: float = 150_000.0
    rms_norm_eps: float = 1e-5
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    rope_scaling: RopeScaling | None = None

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Pairs of a layer with a window and one without; an odd last layer has a window."""
        pairs, rest = divmod(self.num_layers, 2)
        found = (LayerGroup((SLIDING, FULL), pairs), LayerGroup((SLIDING,), rest))
        return tuple(group for group in found if group.count)
