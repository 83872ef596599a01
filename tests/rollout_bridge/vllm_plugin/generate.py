"""Runs in the interpreter that has vLLM: completes the checkpoint, generates with it, and computes one linear layer.

    python generate.py FOLDER

FOLDER/model has config.json, the unquantized tensors and experts.safetensors (codes, scale bytes, multipliers); FOLDER/linear.npz
holds one linear layer, FOLDER/prompts.json token ids. Writes FOLDER/answers.json and FOLDER/linear_out.npy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config

IGNORED = ["lm_head", "model.layers.*.mlp.gate", "model.layers.*.self_attn*"]
SCHEME = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}


def complete(model: Path) -> None:
    """Puts the experts into the checkpoint in the ModelOpt layout, and says so in config.json."""
    tensors = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if ".mlp.experts." not in name}
    for name, tensor in load_file(model / "experts.safetensors").items():
        tensors[name] = tensor.view(torch.float8_e4m3fn) if name.endswith(".weight_scale") else tensor
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    (model / "experts.safetensors").unlink()
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": SCHEME, "input_activations": SCHEME}},
        "ignore": IGNORED,
    }
    (model / "config.json").write_text(json.dumps(config))


def answers(model: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy tokens and their log-probabilities."""
    engine = LLM(
        str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64, enable_prefix_caching=False, seed=0
    )
    parameters = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=0, detokenize=False)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters)
    return [
        {
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)],
        }
        for one in found
    ]


def linear(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """One linear layer by the registered kernel, float32."""
    from rollout_bridge.vllm_plugin.linear import CanonicalNvFp4LinearKernel

    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    layer: Any = SimpleNamespace(
        weight=tensors["codes"],
        weight_scale=tensors["scales"].view(torch.float8_e4m3fn),
        weight_global_scale=tensors["multiplier"],
        input_global_scale=tensors["input_multiplier"],
    )
    with set_current_vllm_config(VllmConfig()):
        kernel = CanonicalNvFp4LinearKernel(None)
    return kernel.apply_weights(layer, tensors["x"], tensors["bias"]).numpy()


def refusals() -> list[str]:
    """What the experts say about scales that would give wrong values silently."""
    from rollout_bridge.vllm_plugin.numerics import NVFP4
    from rollout_bridge.vllm_plugin.nvfp4 import CanonicalModelOptNvFp4FusedMoE

    method = CanonicalModelOptNvFp4FusedMoE.__new__(CanonicalModelOptNvFp4FusedMoE)
    method.use_a16, method.fmt = False, NVFP4
    names = ("w13_weight_scale_2", "w13_input_scale", "w2_weight_scale_2", "w2_input_scale")
    good: dict[str, Any] = {name: torch.ones(2, 2) if name.startswith("w13") else torch.ones(2) for name in names}
    good |= {"layer_name": "model.layers.1.mlp.experts", "activation": "silu", "expert_map": None}
    good["moe_config"] = SimpleNamespace(intermediate_size_per_partition=32)
    method.process_weights_after_loading(SimpleNamespace(**good))
    changes = (
        {"w13_weight_scale_2": torch.tensor([[1.0, 2.0], [1.0, 1.0]])},
        {"w2_input_scale": torch.tensor([1.0, 0.0])},
        {"w2_weight_scale_2": torch.tensor([torch.nan, 1.0])},
        {"activation": "gelu"},
        {"moe_config": SimpleNamespace(intermediate_size_per_partition=24)},
    )
    messages = []
    for change in changes:
        try:
            method.process_weights_after_loading(SimpleNamespace(**good | change))
        except (ValueError, NotImplementedError) as error:
            messages.append(str(error))
    return messages


def main(folder: Path) -> None:
    """See the module."""
    assert "jax" not in sys.modules and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    complete(folder / "model")
    results = answers(folder / "model", json.loads((folder / "prompts.json").read_text()))
    (folder / "answers.json").write_text(json.dumps({"answers": results, "refusals": refusals()}))
    with np.load(folder / "linear.npz") as file:
        np.save(folder / "linear_out.npy", linear(dict(file)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
