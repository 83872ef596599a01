"""The rope keys of a Hugging Face `config.json`, read strictly in both spellings, and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from trace_jax.errors import UserError
from trace_jax.layers.rope import RopeScaling
from trace_jax.models.hf_config import agreeing, boolean, integer, number, require

_TYPE_KEYS = ("rope_type", "type")
_PLAIN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_SCALING = {
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate", "mscale", "mscale_all_dim",
    },
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
}  # fmt: skip


class Rope(NamedTuple):
    """Rotary positions of a checkpoint.

    Args:
      theta: base of the angles.
      scaling: how frequencies follow from those of the pretraining; None if they are the same.
      rotated: share of every head that is rotated.
      mscale_all_dim: `yarn` of DeepSeek: how the scores grow with the context; 0 without it.
    """

    theta: float
    scaling: RopeScaling | None
    rotated: float
    mscale_all_dim: float


def read_rope(
    config_json: Mapping[str, Any],
    *,
    kinds: tuple[str, ...] = (),
    partial: bool = False,
    default_theta: float | None = None,
    default_share: float = 1.0,
) -> Rope:
    """All rope keys, after they were checked against each other.

    Args:
      kinds: the scaled rope types that the family computes, beside `default`.
      partial: whether a part of a head may be rotated.
      default_theta: base where the file does not state one; None if it must.
      default_share: what is rotated of a head where the file does not say.

    Raises:
      UserError: another rope type, an unknown, missing or contradicting key, or a wrong type.
    """
    theta = {"rope_theta": config_json.get("rope_theta")}
    rotated = {"partial_rotary_factor": config_json.get("partial_rotary_factor")}
    scalings: dict[str, RopeScaling] = {}
    mscales: dict[str, float] = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = config_json.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"config.json: {key} is {rope!r}; it must be a mapping like {{'rope_type': 'default', 'rope_theta': 10000.0}}")
        for type_key in _TYPE_KEYS:
            require(f"{key}.{type_key}", rope.get(type_key, "default"), "default", *kinds)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if not partial:
            require(f"{key}.partial_rotary_factor", rope.get("partial_rotary_factor"), 1, None)
        unknown = sorted(set(rope) - _PLAIN - _SCALING.get(kind, set()))
        if unknown:
            fields = "rope_theta only" if kind == "default" else ", ".join(sorted(_SCALING[kind]))
            raise UserError(f"config.json: unknown {key}.{unknown[0]}; rope type {kind!r} has {fields}: remove the key")
        theta[f"{key}.rope_theta"] = rope.get("rope_theta")
        rotated[f"{key}.partial_rotary_factor"] = rope.get("partial_rotary_factor")
        if kind != "default":
            scalings[key] = _scaling(key, kind, rope)
            mscales[key] = number(f"{key}.mscale_all_dim", rope.get("mscale_all_dim") or 0)
    share = agreeing(rotated)
    found = agreeing(theta)
    return Rope(
        theta=number("rope_theta", default_theta if found is None else found),
        scaling=agreeing(scalings),
        rotated=default_share if share is None else number("partial_rotary_factor", share),
        mscale_all_dim=agreeing(mscales) or 0.0,
    )


def write_rope(theta: float, scaling: RopeScaling | None, **further: Any) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` in the spelling of the published checkpoints; `further` keys go into the latter."""
    if scaling is None:
        return {"rope_theta": theta, "rope_scaling": None}
    names = {"original_max_position": "original_max_position_embeddings"}
    fields = {
        "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor", "truncate"),
        "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    }[scaling.kind]
    written = {names.get(name, name): getattr(scaling, name) for name in fields}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": scaling.kind, **written, **further}}


def mscale(factor: float, coefficient: float = 1.0) -> float:
    """YaRN's magnitude of a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


def _scaling(key: str, kind: str, rope: Mapping[str, Any]) -> RopeScaling:
    factor = number(f"{key}.factor", rope.get("factor"))
    original = integer(f"{key}.original_max_position_embeddings", rope.get("original_max_position_embeddings"))
    if kind == "llama3":
        low, high = (number(f"{key}.{name}", rope.get(name)) for name in ("low_freq_factor", "high_freq_factor"))
        return RopeScaling(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    stated = rope.get("attention_factor")
    if stated is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        stated = mscale(factor, number(f"{key}.mscale", rope["mscale"])) / mscale(
            factor, number(f"{key}.mscale_all_dim", rope["mscale_all_dim"])
        )
    return RopeScaling(
        kind,
        factor,
        original,
        beta_fast=number(f"{key}.beta_fast", rope.get("beta_fast") or 32),
        beta_slow=number(f"{key}.beta_slow", rope.get("beta_slow") or 1),
        attention_factor=mscale(factor) if stated is None else number(f"{key}.attention_factor", stated),
        truncate=boolean(f"{key}.truncate", rope.get("truncate", True)),
    )
