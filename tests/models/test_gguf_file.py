"""GGUF files become Hugging Face directories: values, names, the order of rotary rows, and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tiny_gguf import HEADS, KV_HEADS, TOKENS, WIDTH, write_gguf
from trace_jax.errors import UserError
from trace_jax.hf_tokenizer import load_hf_tokenizer
from trace_jax.models.gguf_file import write_hf_directory


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    held = write_gguf(tmp_path / "model.gguf")
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
    write_gguf(folder / "model.gguf", pre="unknown")
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
    write_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(UserError, match=message):
        write_hf_directory(tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 3000, -500])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
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
