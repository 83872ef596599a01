"""Strict reading of a Hugging Face `config.json`, and writing it, from a family's list of keys.

Every key is used, or must hold a value that the family computes, or is listed as without effect on the logits, or is refused. Two
spellings exist and both are read: transformers 4 and most published checkpoints write `rope_theta` with `rope_scaling`; transformers 5
writes `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.decoder_config import DecoderConfig

COMMON_REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "max_position_embeddings": "max_position",
}
"""Integer keys that every family has, and the config field each one fills."""

COMMON_IRRELEVANT = frozenset(
    {
        "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version",
        "initializer_range", "use_cache", "output_router_logits", "router_aux_loss_coef",
        "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    }
)  # fmt: skip
"""Keys without effect on the logits of any family."""

ROPE_KEYS = frozenset({"rope_theta", "rope_parameters", "rope_scaling"})


@dataclass(frozen=True)
class ConfigKeys:
    """What a family knows of `config.json`.

    Args:
      model_type, architecture: values of the keys `model_type` and `architectures`.
      required: further integer keys without which the model is not defined, and the config field each one fills.
      optional: keys that may be absent, the config field each one fills, and what transformers takes then.
      fixed: keys of which one meaning is computed; the first value is the one to write.
      unwritten: those of `fixed` that published checkpoints do not have.
      irrelevant: keys without effect on the logits, beside those of every family.
      handled: keys that the family reads or checks one by one.
    """

    model_type: str
    architecture: str
    required: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unwritten: frozenset[str] = frozenset()
    irrelevant: frozenset[str] = frozenset()
    handled: frozenset[str] = frozenset()


def read_keys(config_json: Mapping[str, Any], keys: ConfigKeys, **integers: Any) -> dict[str, Any]:
    """Config fields from a parsed `config.json`; the rope keys and those in `handled` are left to the family.

    Args:
      integers: values of required keys that have several spellings.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model that the family does not compute.
    """
    _refuse_what_is_not_computed(config_json, keys)
    values: dict[str, Any] = {}
    for key, name in {**COMMON_REQUIRED, **keys.required}.items():
        values[name] = integer(key, integers.get(key, config_json.get(key)))
    for key, (name, default) in keys.optional.items():
        found = config_json.get(key, default)
        kinds = {bool: boolean, int: integer, float: number}
        values[name] = kinds[type(default)](key, found)
    return values


def build(config_type: type[DecoderConfig], values: Mapping[str, Any]) -> Any:
    """The config of these fields.

    Raises:
      UserError: they describe no model; the line says that config.json does.
    """
    try:
        return config_type(**values)
    except UserError as error:
        raise UserError(f"config.json describes no valid model: {error}") from error


def write_keys(config: DecoderConfig, keys: ConfigKeys) -> dict[str, Any]:
    """The keys that `read_keys` reads, in the spelling of the published checkpoints; the family adds the rest."""
    return {
        "architectures": [keys.architecture],
        "model_type": keys.model_type,
        **{key: allowed[0] for key, allowed in keys.fixed.items() if key not in keys.unwritten},
        **{key: getattr(config, name) for key, name in {**COMMON_REQUIRED, **keys.required}.items()},
        **{key: getattr(config, name) for key, (name, _) in keys.optional.items()},
    }


def head_dim(config_json: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """The key `head_dim`, or without it the width divided by the query heads.

    Raises:
      UserError: it is no integer, or absent where the heads do not divide the width.
    """
    found = config_json.get("head_dim")
    if found is not None:
        return integer("head_dim", found)
    if values["hidden_size"] % values["num_heads"]:
        raise UserError("config.json has no head_dim and num_attention_heads does not divide hidden_size; write head_dim")
    return values["hidden_size"] // values["num_heads"]


def require(key: str, value: Any, *allowed: Any) -> None:
    """Refuses a value that would change the computation; the first allowed one is named as the remedy.

    Raises:
      UserError: the value is none of them.
    """
    if value not in allowed or (isinstance(value, bool) and not any(value is known for known in allowed)):
        raise UserError(f"config.json: {key} is {value!r}, but only {allowed[0]!r} is implemented; take a checkpoint with that")


def agreeing(found: Mapping[str, Any]) -> Any:
    """The one value among several spellings (name as the user reads it -> value or None); None if no spelling is present.

    Raises:
      UserError: two spellings have different values.
    """
    present = {name: value for name, value in found.items() if value is not None}
    values = list(present.values())
    if any(value != values[0] for value in values):
        listed = " and ".join(f"{name}={value!r}" for name, value in present.items())
        raise UserError(f"config.json contradicts itself: {listed}; keep the right one")
    return values[0] if values else None


def integer(key: str, value: Any) -> int:
    """An integer value, or a UserError that names the key."""
    if value is None:
        raise UserError(f"config.json: {key} is missing; write it as the checkpoint was trained")
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"config.json: {key} is {value!r}; it must be an integer")
    return value


def number(key: str, value: Any) -> float:
    """A finite number, or a UserError that names the key."""
    if value is None:
        raise UserError(f"config.json: {key} is missing; write it as the checkpoint was trained")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"config.json: {key} is {value!r}; it must be a finite number")
    return float(value)


def boolean(key: str, value: Any) -> bool:
    """A truth value, or a UserError that names the key."""
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r}; it must be true or false")
    return value


def _refuse_what_is_not_computed(config_json: Mapping[str, Any], keys: ConfigKeys) -> None:
    if "model_type" not in config_json:
        family = keys.architecture.removesuffix("ForCausalLM")
        raise UserError(f"config.json has no model_type; write '{keys.model_type}' if this is a {family} checkpoint")
    require("model_type", config_json["model_type"], keys.model_type)
    quantized = config_json.get("quantization_config")
    if quantized is not None and "quantization_config" not in keys.handled:
        raise UserError("config.json has quantization_config: the weights are already quantized; import the BF16 checkpoint instead")
    for key, allowed in keys.fixed.items():
        require(key, config_json.get(key, allowed[0]), *allowed)
    require("architectures", config_json.get("architectures"), [keys.architecture], None)
    known = {"model_type", "architectures", "quantization_config", *COMMON_REQUIRED, *COMMON_IRRELEVANT, *ROPE_KEYS}
    known |= {*keys.required, *keys.optional, *keys.fixed, *keys.irrelevant, *keys.handled}
    unknown = sorted(set(config_json) - known)
    if unknown:
        raise UserError(
            f"config.json: unknown {', '.join(unknown)}; {keys.model_type} would ignore it, so the logits might differ: "
            "remove the key if it has no effect on the computation"
        )
