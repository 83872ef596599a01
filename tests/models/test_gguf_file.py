"""GGUF files become Hugging Face directories: values, names, the order of rotary rows, and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from trace_jax.errors import UserError
from trace_jax.hf_tokenizer import load_hf_tokenizer
from trace_jax.models.gguf_file import write_hf_directory

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


def make(path: Path, *, arch: str = "llama", pre: str = "smollm", quantized: bool = True, **extra: float) -> dict[str, np.ndarray]:
    """Writes a random model and returns the values that its tensors hold."""
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
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and len(shape) == 2 else gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(values, kind)
        held[name] = gguf.dequantize(stored, kind).reshape(shape)
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    held = make(tmp_path / "model.gguf")
    (tmp_path / "hf").mkdir()
    write_hf_directory(tmp_path / "model.gguf", tmp_path / "hf")
    return tmp_path / "hf", held


def test_values_are_the_dequantized_ones(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, held = converted
    found = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], held["token_embd.weight"])
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], held["blk.1.ffn_down.weight"])
    np.testing.assert_array_equal(found["model.layers.0.self_attn.v_proj.weight"], held["blk.0.attn_v.weight"])
    assert len(found) == len(held)


def test_rotary_halves_are_put_apart_again(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Row 2i + h of a head in the file is row i of half h."""
    directory, held = converted
    found, head = load_file(directory / "model.safetensors"), WIDTH // HEADS
    for name, module, heads in [("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)]:
        stored, ours = held[f"blk.0.{name}.weight"], found[f"model.layers.0.self_attn.{module}.weight"]
        for row in range(heads * head):
            base, half, index = row // head * head, row % head % 2, row % head // 2
            np.testing.assert_array_equal(stored[row], ours[base + half * (head // 2) + index])


def test_config(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    assert (config["model_type"], config["head_dim"], config["vocab_size"]) == ("llama", WIDTH // HEADS, len(TOKENS))
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 100000.0, True)


def test_tokenizer(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = load_hf_tokenizer(str(converted[0]))
    ids = {token: index for index, token in enumerate(TOKENS)}
    assert tokenizer.encode("hell 12 hey<|end|>") == [
        ids["hell"], ids["Ġ"], ids["1"], ids["2"], ids["Ġhe"], ids["y"], ids["<|end|>"],
    ]  # fmt: skip
    assert tokenizer.apply_prompt("hi") == [ids["<|user|>"], ids["h"], ids["i"], ids["<|end|>"]]
    assert tokenizer.eos_id == 0


def test_a_tokenizer_beside_the_file_is_taken(converted: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    folder = tmp_path / "beside"
    folder.mkdir()
    make(folder / "model.gguf", pre="unknown")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(converted[0] / name, folder / name)
    out = tmp_path / "out"
    out.mkdir()
    write_hf_directory(folder / "model.gguf", out)
    assert (out / "tokenizer.json").read_bytes() == (converted[0] / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "gemma"}, "the architecture is 'gemma'; read are llama, qwen3"),
        ({"pre": "tekken"}, "its tokenizer is 'gpt2' with 'tekken'; read are byte-level BPE with gpt-2, smollm"),
        ({"rope__scaling__factor": 8.0}, "has llama.rope.scaling.factor, which is not computed here"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    make(tmp_path / "model.gguf", **options)
    with pytest.raises(UserError, match=message):
        write_hf_directory(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 3000, -500])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="is truncated or no GGUF file"):
        write_hf_directory(path, tmp_path)


@pytest.mark.parity
def test_transformers_reads_the_same_model(converted: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(converted[0]).state_dict()
    assert theirs.keys() == ours.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(values.float().numpy(), ours[name].float().numpy(), err_msg=name)
