"""A tiny random Llama or Qwen3 in one GGUF file, with a tokenizer of printable ASCII and a chat template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")

WIDTH, HEADS, KV_HEADS, HIDDEN, LAYERS = 64, 4, 2, 96, 2
TOKENS = ["<|end|>", "<|user|>", *(chr(code) for code in range(33, 127)), "Ġ", "he", "ll", "hell", "Ġhe"]
MERGES = ["h e", "l l", "he ll", "Ġ he"]
SHAPES = {
    "attn_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
    "attn_q.weight": (WIDTH, WIDTH),
    "attn_k.weight": (WIDTH // 2, WIDTH),
    "attn_v.weight": (WIDTH // 2, WIDTH),
    "attn_output.weight": (WIDTH, WIDTH),
    "ffn_gate.weight": (HIDDEN, WIDTH),
    "ffn_up.weight": (HIDDEN, WIDTH),
    "ffn_down.weight": (WIDTH, HIDDEN),
}


def write_gguf(
    path: Path, *, arch: str = "llama", pre: str = "smollm", quantized: bool = True, deviation: float | None = None, **extra: float
) -> dict[str, np.ndarray]:
    """Writes a random model and returns the values that its tensors hold.

    Args:
      path: of the file.
      arch, pre: architecture and kind of tokenizer.
      quantized: whether matrices are stored in Q8_0 instead of float32.
      deviation: of the matrices, whose norms are then ones, as at the start of a training; None draws everything from the unit normal.
      extra: further float32 keys, with a double underscore for each dot.
    """
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in extra.items():
        writer.add_float32(f"{arch}.{key.replace('__', '.')}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, *[1] * (len(TOKENS) - 2)])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}")
    held = {}
    shapes = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in SHAPES.items()}
    for name, shape in {"token_embd.weight": (len(TOKENS), WIDTH), **shapes, "output_norm.weight": (WIDTH,)}.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if deviation is not None:
            values = np.ones_like(values) if len(shape) == 1 else np.float32(deviation) * values
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and len(shape) == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(values, kind)
        held[name] = gguf.dequantize(stored, kind).reshape(shape)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
