"""Shape and constants of a DeepSeek-V3 decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from trace_jax.errors import UserError
from trace_jax.layers.rope import RopeScaling
from trace_jax.models.biased_moe import BiasedMoeConfig
from trace_jax.models.decoder_config import DENSE


@dataclass(frozen=True, kw_only=True)
class DeepseekV3Config(BiasedMoeConfig):
    """Hyper-parameters of a DeepSeek-V3 decoder beside those of `BiasedMoeConfig`; `num_kv_heads` and `head_dim` follow from the others.

    Args:
      query_rank: width that queries are projected down to; 0 where they are projected at once.
      latent_rank: width that keys and values are projected down to, which is what the cache holds.
      plain_dim: entries of a head's query and key that are not rotated.
      rotary_dim: further entries that are, shared by the keys of all heads; even.
      value_dim: width of a head's value.
      interleaved: whether pairs to rotate stand side by side in the weights' rows, not in two halves.
      rope_scaling: `yarn`, or None.
      mscale_all_dim: how YaRN's longer context raises the scores; 0 where it does not.

    Raises:
      UserError: also if `rotary_dim` is odd.
    """

    FAMILY = "deepseek_v3"
    CACHE_REASON = "caches one latent vector for all heads, from which keys and values are multiplied anew, not keys and values"

    num_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    query_rank: int = field(metadata={"least": 0})
    latent_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    interleaved: bool = True
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    mscale_all_dim: float = field(default=0.0, metadata={"least": 0})

    def __post_init__(self) -> None:
        if self.rotary_dim % 2:
            raise UserError(f"model.config.rotary_dim={self.rotary_dim} must be even: rotary embedding turns pairs")
        object.__setattr__(self, "num_kv_heads", self.num_heads)
        object.__setattr__(self, "head_dim", self.plain_dim + self.rotary_dim)
        super().__post_init__()

    def sites_of(self, kind: str) -> tuple[str, ...]:
        """The experts' inputs; the cache stays in the compute dtype."""
        return () if kind == DENSE else ("expert_input", "down_input")

    @property
    def cache_layer_ids(self) -> tuple[int, ...]:
        """Every layer."""
        return tuple(range(self.num_layers))

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """One latent vector in the place of the keys, the shared rotated entries in that of the values."""
        return 1, self.latent_rank, self.rotary_dim
