"""Shape and constants of a GLM-4.5 decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.errors import UserError
from trace_jax.models.biased_moe import BiasedMoeConfig


@dataclass(frozen=True, kw_only=True)
class Glm4MoeConfig(BiasedMoeConfig):
    """Hyper-parameters of a GLM-4.5 decoder beside those of `BiasedMoeConfig`.

    Args:
      rotary_dim: entries of every head that are rotated; even.
      qk_norm: whether queries and keys are normalised, head by head.
      attention_bias: whether the projections of queries, keys and values have a bias.

    Raises:
      UserError: also if `rotary_dim` is odd or wider than a head.
    """

    FAMILY = "glm4_moe"

    rotary_dim: int
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise UserError(f"model.config.rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}")

    @property
    def norms(self) -> tuple[int, int] | None:
        """Lengths of the norms of queries and keys."""
        return (self.head_dim, self.head_dim) if self.qk_norm else None

    @property
    def biases(self) -> str:
        """Letters of the projections with a bias."""
        return "qkv" if self.attention_bias else ""
