"""Shape and constants of a Mixtral decoder."""

from __future__ import annotations

from dataclasses import dataclass

from trace_jax.models.decoder_config import MoeConfig


@dataclass(frozen=True, kw_only=True)
class MixtralConfig(MoeConfig):
    """Hyper-parameters of a Mixtral decoder: those that every family has; all layers have experts."""

    FAMILY = "mixtral"

    rms_norm_eps: float = 1e-5
