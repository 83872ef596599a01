"""Hugging Face `config.json` of Qwen3-MoE, both ways.

Reading is strict: every key is used, or must hold the one value this implementation computes, or is listed here as
without effect on the logits, or is refused. Two spellings exist and both are read: transformers 4 and the published
checkpoints write `rope_theta` with `rope_scaling` and `num_experts`; transformers 5 writes `rope_parameters` and
`num_local_experts`.
"""

from __future__ import annotations

import math
from typing import Any

from trace_jax.errors import UserError
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"

REQUIRED = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_hidden_size",
    "max_position_embeddings": "max_position",
}
"""Integer keys without which the model is not defined, and the config field each one fills."""

OPTIONAL = {
    "rms_norm_eps": ("rms_norm_eps", 1e-6),
    "norm_topk_prob": ("norm_topk_prob", False),
    "tie_word_embeddings": ("tie_embeddings", False),
    "attention_bias": ("attention_bias", False),
}
"""Keys that may be absent, the config field each one fills, and what transformers takes then."""

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": (MODEL_TYPE,),
    "hidden_act": ("silu",),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
    "is_encoder_decoder": (False,),
}
"""Keys of which this implementation computes one meaning only; the first value is the one to write."""

IRRELEVANT = frozenset(
    {
        "_name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version",
        "initializer_range", "use_cache", "output_router_logits", "router_aux_loss_coef",
        "intermediate_size",  # width of dense layers, of which there are none
        "sliding_window", "max_window_layers",  # without effect while use_sliding_window is false
        "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
    }
)  # fmt: skip
"""Keys without effect on the logits."""

HANDLED = {
    "head_dim", "num_local_experts", "architectures", "layer_types", "quantization_config", "rope_theta", "rope_parameters", "rope_scaling",
}  # fmt: skip
"""Keys that are read or checked one by one."""


def from_hf(config_json: dict[str, Any]) -> Qwen3MoeConfig:
    """Reads a parsed `config.json`.

    Args:
      config_json: the file's top-level mapping, in either spelling.

    Raises:
      UserError: a missing, unknown or contradicting key, a wrong type, or a model this family does not compute
        (another rope type, sliding window, dense layers, another activation, quantized weights).
    """
    _refuse_what_is_not_computed(config_json)
    values: dict[str, Any] = {}
    experts = _agreeing({name: config_json.get(name) for name in ("num_experts", "num_local_experts")})
    for key, field in REQUIRED.items():
        found = experts if key == "num_experts" else config_json.get(key)
        values[field] = _integer(key, found)
    for key, (field, default) in OPTIONAL.items():
        found = config_json.get(key, default)
        values[field] = _number(key, found) if isinstance(default, float) else _boolean(key, found)
    head_dim = config_json.get("head_dim")
    values["head_dim"] = _derived_head_dim(values) if head_dim is None else _integer("head_dim", head_dim)
    values["rope_theta"] = _rope_theta(config_json)
    try:
        return Qwen3MoeConfig(**values)
    except UserError as error:
        raise UserError(f"config.json describes no valid model: {error}") from error


def to_hf(config: Qwen3MoeConfig) -> dict[str, Any]:
    """The `config.json` mapping in the spelling of the published checkpoints, which transformers 4, 5 and vLLM all read."""
    return {
        "architectures": [ARCHITECTURE],
        **{key: allowed[0] for key, allowed in FIXED.items() if key not in ("partial_rotary_factor", "is_encoder_decoder")},
        **{key: getattr(config, field) for key, field in REQUIRED.items()},
        **{key: getattr(config, field) for key, (field, _) in OPTIONAL.items()},
        "head_dim": config.head_dim,
        "intermediate_size": config.expert_hidden_size,
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "sliding_window": None,
    }


def _refuse_what_is_not_computed(config_json: dict[str, Any]) -> None:
    if "model_type" not in config_json:
        raise UserError(f"config.json has no model_type; write '{MODEL_TYPE}' if this is a Qwen3-MoE checkpoint")
    if config_json.get("quantization_config") is not None:
        raise UserError("config.json has quantization_config: the weights are already quantized; import the BF16 checkpoint instead")
    for key, allowed in FIXED.items():
        _require(key, config_json.get(key, allowed[0]), *allowed)
    _require("architectures", config_json.get("architectures"), [ARCHITECTURE], None)
    for kind in config_json.get("layer_types") or []:
        _require("layer_types", kind, "full_attention")
    known = {*REQUIRED, *OPTIONAL, *FIXED, *HANDLED, *IRRELEVANT}
    unknown = sorted(set(config_json) - known)
    if unknown:
        raise UserError(
            f"config.json: unknown {', '.join(unknown)}; {MODEL_TYPE} would ignore it, so the logits might differ: "
            "remove the key if it has no effect on the computation"
        )


def _require(key: str, value: Any, *allowed: Any) -> None:
    """Refuses a value that would change the computation; the first allowed one is named as the remedy."""
    if value not in allowed or (isinstance(value, bool) and not any(value is known for known in allowed)):
        raise UserError(f"config.json: {key} is {value!r}, but only {allowed[0]!r} is implemented; take a checkpoint with that")


def _rope_theta(config_json: dict[str, Any]) -> float:
    """Base of the rotary angles, after all three rope keys were checked against each other."""
    theta = {"rope_theta": config_json.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        rope = config_json.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise UserError(f"config.json: {key} is {rope!r}; it must be a mapping like {{'rope_type': 'default', 'rope_theta': 10000.0}}")
        for type_key in ("rope_type", "type"):
            _require(f"{key}.{type_key}", rope.get(type_key, "default"), "default")
        _require(f"{key}.partial_rotary_factor", rope.get("partial_rotary_factor"), 1, None)
        unknown = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if unknown:
            raise UserError(f"config.json: unknown {key}.{unknown[0]}; rope type 'default' has rope_theta only: remove the key")
        theta[f"{key}.rope_theta"] = rope.get("rope_theta")
    return _number("rope_theta", _agreeing(theta))


def _agreeing(found: dict[str, Any]) -> Any:
    """The one value among several spellings (name as the user reads it -> value or None); None if no spelling is present."""
    present = {name: value for name, value in found.items() if value is not None}
    values = list(present.values())
    if any(value != values[0] for value in values):
        listed = " and ".join(f"{name}={value!r}" for name, value in present.items())
        raise UserError(f"config.json contradicts itself: {listed}; keep the right one")
    return values[0] if values else None


def _derived_head_dim(values: dict[str, Any]) -> int:
    if values["hidden_size"] % values["num_heads"]:
        raise UserError("config.json has no head_dim and num_attention_heads does not divide hidden_size; write head_dim")
    return values["hidden_size"] // values["num_heads"]


def _integer(key: str, value: Any) -> int:
    if value is None:
        raise UserError(f"config.json: {key} is missing; write it as the checkpoint was trained")
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(f"config.json: {key} is {value!r}; it must be an integer")
    return value


def _number(key: str, value: Any) -> float:
    if value is None:
        raise UserError(f"config.json: {key} is missing; write it as the checkpoint was trained")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"config.json: {key} is {value!r}; it must be a finite number")
    return float(value)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r}; it must be true or false")
    return value
