"""A dense model in one GGUF file becomes a Hugging Face directory in float32, from which everything else is read.

Weights are dequantized by the `gguf` package. Two things differ from Hugging Face: llama files store queries and keys with the halves of
each rotary pair interleaved, and the tokenizer is a list of tokens and merges.

Source: the GGUF specification and the converter of llama.cpp, whose row permutation of `attn_q` and `attn_k` is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.models.gguf_tokenizer import write_tokenizer
from trace_jax.models.tensor_files import NamedShapes, write_tensors

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture`, which is also the Hugging Face `model_type` -> class."""

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""Names of modules, outside of and inside a block."""

IGNORED_KEYS = ("general.", "tokenizer.", "GGUF.")
MAX_SHARD_BYTES = 256_000_000
"""A file is held in memory while it is written."""


def write_hf_directory(path: Path, directory: Path) -> None:
    """Writes config.json, safetensors (float32) and the tokenizer of a GGUF file into an existing folder.

    Raises:
      UserError: the `gguf` package is missing, the file is damaged, or it holds a model or tokenizer that is not read.
    """
    reader = _open(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(path, fields, "output.weight" not in tensors)
    shapes = [(_hf_name(path, name), tuple(int(size) for size in reversed(tensor.shape))) for name, tensor in tensors.items()]
    write_tensors(directory, shapes, _values(tensors, shapes, config), np.dtype(np.float32), MAX_SHARD_BYTES)
    write_tokenizer(path, fields, directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"{path} needs the package gguf; install it with: pip install 'trace-jax[gguf]'") from error
    try:
        return GGUFReader(path)
    except (ValueError, OSError, IndexError, KeyError) as error:
        raise UserError(f"{path} is truncated or no GGUF file ({error}); download it again") from error


def _config(path: Path, fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    """config.json of the model; a key without a meaning here is refused."""
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{path}: the architecture is {kind!r}; read are {', '.join(ARCHITECTURES)}: import the safetensors checkpoint instead"
        )
    values = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if not name.startswith(IGNORED_KEYS)}
    try:
        config = {
            "model_type": kind,
            "architectures": [ARCHITECTURES[kind]],
            "vocab_size": values.pop("vocab_size", None) or len(fields["tokenizer.ggml.tokens"]),
            "hidden_size": values.pop("embedding_length"),
            "intermediate_size": values.pop("feed_forward_length"),
            "num_hidden_layers": values.pop("block_count"),
            "num_attention_heads": values.pop("attention.head_count"),
            "num_key_value_heads": values.pop("attention.head_count_kv"),
            "max_position_embeddings": values.pop("context_length"),
            "rms_norm_eps": _decimal(values.pop("attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(values.pop("rope.freq_base", 10000.0)),
            "tie_word_embeddings": tied,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "float32",
        }
    except KeyError as error:
        raise UserError(f"{path} lacks the key {kind}.{error.args[0]}; download it again") from error
    widths = {values.pop(key) for key in ("rope.dimension_count", "attention.key_length", "attention.value_length") if key in values}
    config["head_dim"] = widths.pop() if widths else config["hidden_size"] // config["num_attention_heads"]
    if widths or values:
        culprit = f"{kind}.{sorted(values)[0]}" if values else "heads of several widths"
        raise UserError(f"{path} has {culprit}, which is not computed here; import the safetensors checkpoint instead")
    return config


def _decimal(value: float) -> float:
    """The decimal number that somebody wrote before it became a float32."""
    return float(str(np.float32(value)))


def _hf_name(path: Path, name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in OUTER:
        return f"{OUTER[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in INNER:
        return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[3]}"
    raise UserError(f"{path} has the tensor {name}, which is not computed here; import the safetensors checkpoint instead")


def _values(tensors: dict[str, Any], shapes: NamedShapes, config: dict[str, Any]) -> Iterator[tuple[str, Float[np.ndarray, "*shape"]]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for (stored, tensor), (name, shape) in zip(tensors.items(), shapes, strict=True):
        values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        module = stored.split(".")[-2]
        if config["model_type"] == "llama" and module in heads:
            values = values.reshape(heads[module], -1, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        yield name, values
