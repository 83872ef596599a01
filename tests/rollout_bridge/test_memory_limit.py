"""Import and export of a checkpoint that is larger than the memory that the process may have."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent.parent
LAYERS, HIDDEN, EXPERT_HIDDEN, EXPERTS, VOCAB = 16, 1024, 512, 32, 512
LIMIT = 1_200_000 * 1024
"""Bytes of data (RLIMIT_DATA: heap and anonymous private mappings), of which a third goes to the interpreter, JAX and its threads."""

CONFIG = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": EXPERT_HIDDEN, "intermediate_size": EXPERT_HIDDEN, "vocab_size": VOCAB, "rms_norm_eps": 1e-6},
    **{"rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False, "decoder_sparse_step": 1},
    **{"mlp_only_layers": [], "norm_topk_prob": True, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16"},
}
TASK = ("--task", "reasoning_gym:chain_sum", "task.params={min_terms: 2, max_terms: 2, size: 100}", "calibration.prompts=4")


def write_checkpoint(folder: Path) -> int:
    """A Qwen3-MoE checkpoint, one file a layer; returns its bytes."""
    folder.mkdir()
    block = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(ml_dtypes.bfloat16)
    one = np.ones(HIDDEN, ml_dtypes.bfloat16)
    where: dict[str, str] = {}

    def made(*shape: int) -> np.ndarray:
        return np.resize(np.roll(block, 977 * len(where)), shape)

    def save(name: str, tensors: dict[str, np.ndarray]) -> int:
        save_file(tensors, folder / name)
        where.update(dict.fromkeys(tensors, name))
        return (folder / name).stat().st_size

    total = save(
        "rest.safetensors",
        {"model.embed_tokens.weight": made(VOCAB, HIDDEN), "lm_head.weight": made(VOCAB, HIDDEN), "model.norm.weight": one},
    )
    for layer in range(LAYERS):
        part = {f"{name}.weight": one for name in ("input_layernorm", "post_attention_layernorm")}
        part |= {f"self_attn.{name}_norm.weight": one[:64] for name in "qk"}
        part |= {f"self_attn.{name}_proj.weight": made(rows, HIDDEN) for name, rows in (("q", 512), ("k", 128), ("v", 128))}
        part |= {"self_attn.o_proj.weight": made(HIDDEN, 512), "mlp.gate.weight": made(EXPERTS, HIDDEN)}
        for expert in range(EXPERTS):
            for name, shape in (("gate", (EXPERT_HIDDEN, HIDDEN)), ("up", (EXPERT_HIDDEN, HIDDEN)), ("down", (HIDDEN, EXPERT_HIDDEN))):
                part[f"mlp.experts.{expert}.{name}_proj.weight"] = made(*shape)
        total += save(f"layer-{layer:02d}.safetensors", {f"model.layers.{layer}.{name}": tensor for name, tensor in part.items()})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return total


def limited(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Python with these words, where no more than LIMIT bytes of data may be had."""
    command = ["bash", "-c", f'ulimit -d {LIMIT // 1024} && exec "$@"', "limited", sys.executable, *map(str, words)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_a_checkpoint_larger_than_the_memory_is_imported_and_exported(tmp_path: Path) -> None:
    size = write_checkpoint(tmp_path / "hf")
    assert size > 1.3 * LIMIT
    # The control: the limit is one, and the whole checkpoint does not fit.
    whole = limited(
        "-c", "import pathlib, sys; held = [path.read_bytes() for path in pathlib.Path(sys.argv[1]).iterdir()]", tmp_path / "hf"
    )
    assert whole.returncode != 0 and "MemoryError" in whole.stderr
    for words in (
        ("export", tmp_path / "hf", tmp_path / "from-hf", *TASK),
        ("import", tmp_path / "hf", tmp_path / "orbax"),
        ("export", tmp_path / "orbax", tmp_path / "from-orbax", *TASK),
    ):
        done = limited("-m", "trace_jax", *words)
        assert done.returncode == 0, done.stderr
    files = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("from-hf", "from-orbax")]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    assert all(one.read_bytes() == other.read_bytes() for one, other in zip(*files, strict=True))
