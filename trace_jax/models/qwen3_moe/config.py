"""Shape and constants of a Qwen3-MoE decoder."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields
from typing import Any

from trace_jax.errors import UserError


@dataclass(frozen=True)
class Qwen3MoeConfig:
    """Hyper-parameters of a Qwen3-MoE decoder; hashable, so it can be a static argument under `jax.jit`.

    Args:
      vocab_size: V, rows of the embedding.
      hidden_size: D, width of the residual stream.
      num_layers: L, decoder layers; every layer is a mixture of experts.
      num_heads: H, query heads.
      num_kv_heads: K, key and value heads; divides `num_heads`.
      head_dim: width of one head; even (rotary pairs).
      num_experts: E.
      experts_per_token: k, experts that process a token.
      expert_hidden_size: F, hidden width of one expert.
      rope_theta: base of the rotary angles.
      rms_norm_eps: epsilon of every RMS norm.
      norm_topk_prob: whether the k selected router probabilities are rescaled to sum to one.
      tie_embeddings: whether the output head is the embedding matrix.
      max_position: context length in tokens.
      attention_bias: whether the four attention projections have a bias.

    Raises:
      UserError: a value is not positive, or the head counts do not divide.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_hidden_size: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    norm_topk_prob: bool = True
    tie_embeddings: bool = False
    max_position: int = 4096
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float") and not value > 0:
                raise UserError(f"model.config.{field.name} is {value}; it must be greater than 0")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"model.config.num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise UserError(f"model.config.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.experts_per_token > self.num_experts:
            raise UserError(f"model.config.experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Qwen3MoeConfig:
        """Builds a config from a plain mapping with this class's field names.

        Raises:
          UserError: an unknown or missing field, or a value of the wrong type.
        """
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise UserError(f"model.config.{unknown[0]} is not a field of qwen3_moe; fields: {', '.join(sorted(known))}")
        missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in values]
        if missing:
            raise UserError(f"model.config.{missing[0]} is missing; qwen3_moe needs {', '.join(missing)}")
        kinds = {"int": int, "float": (int, float), "bool": bool}
        for name, value in values.items():
            kind = kinds[str(known[name].type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise UserError(f"model.config.{name} is {value!r}; it must be of type {known[name].type}")
        floats = {name for name, field in known.items() if field.type == "float"}
        converted: dict[str, Any] = {name: float(value) if name in floats else value for name, value in values.items()}
        return cls(**converted)

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain mapping; `from_dict` inverts it."""
        return dataclasses.asdict(self)
