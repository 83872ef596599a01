"""Rotary tables of scaled positions, and heads of which only a part is rotated.

Sources: YaRN, Peng et al., arXiv 2309.00071; the frequency bands of Llama 3, arXiv 2407.21783, as its checkpoints state them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import rope_tables, rotate
from pallas_kernels.arithmetic import flushed
from trace_jax.errors import UserError

Tables = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]
"""Cosines and sines of the angles, float32."""


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies of a long context follow from those of the pretrained one.

    Args:
      kind: `yarn` or `llama3`.
      factor: by which slow frequencies are divided.
      original_max_position: context of the pretraining, tokens.
      beta_fast, beta_slow: `yarn`: turns within that context above which a frequency stays, and below which it is divided.
      attention_factor: `yarn`: factor of cosines and sines.
      truncate: `yarn`: whether the ends of the ramp between the two are whole numbers.
      low_freq_factor, high_freq_factor: `llama3`: turns below which a frequency is divided, and above which it stays.

    Raises:
      UserError: an unknown kind.
    """

    kind: str
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind not in ("yarn", "llama3"):
            raise UserError(f"model.config.rope_scaling.kind is {self.kind!r}; write yarn or llama3, or no rope_scaling")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeScaling:
        """Builds the scaling from a plain mapping with this class's field names.

        Raises:
          UserError: an unknown or missing field, or a value of the wrong type.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise UserError(f"model.config.rope_scaling.{name} is no field; fields: {', '.join(known)}")
            kind = {"str": str, "bool": bool, "int": int, "float": (int, float)}[str(known[name].type)]
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise UserError(f"model.config.rope_scaling.{name} is {value!r}; it must be of type {known[name].type}")
        missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in values]
        if missing:
            raise UserError(f"model.config.rope_scaling.{missing[0]} is missing; it needs {', '.join(missing)}")
        return cls(**values)


def tables(positions: Int[Array, "B T"], width: int, theta: float, scaling: RopeScaling | None = None) -> Tables:
    """Cosines and sines by which `width` entries of every head are rotated, in pairs."""
    if scaling is None:
        return rope_tables(positions, width, theta)
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(scaled_frequencies(width, theta, scaling))[None, None]
    factor = jnp.float32(scaling.attention_factor if scaling.kind == "yarn" else 1.0)
    return jax.lax.optimization_barrier((flushed(jnp.cos(angle) * factor), flushed(jnp.sin(angle) * factor)))


def scaled_frequencies(width: int, theta: float, scaling: RopeScaling) -> Float[np.ndarray, " half"]:
    """Radians a token of each pair of entries, float32."""
    half = width // 2
    frequency = theta ** -(np.arange(half) / half)
    divided = frequency / scaling.factor
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    if scaling.kind == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    else:
        low, high = (_pair_of(turns, half, theta, scaling) for turns in (scaling.beta_fast, scaling.beta_slow))
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        kept = 1.0 - np.clip((np.arange(half) - low) / max(high - low, 0.001), 0.0, 1.0)
    return (divided * (1.0 - kept) + frequency * kept).astype(np.float32)


def rotate_part(x: Float[Array, "B T heads head_dim"], turns: Tables) -> Float[Array, "B T heads head_dim"]:
    """Rotates the first entries of every head, as many as the tables have; the others stay."""
    width = 2 * turns[0].shape[-1]
    if width == x.shape[-1]:
        return rotate(x, *turns)
    return jnp.concatenate([rotate(x[..., :width], *turns), x[..., width:]], axis=-1)


def _pair_of(turns: float, half: int, theta: float, scaling: RopeScaling) -> float:
    """The (fractional) pair that makes so many turns within the original context."""
    return half * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / math.log(theta)
