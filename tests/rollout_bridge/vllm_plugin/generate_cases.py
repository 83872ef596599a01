"""Runs in the interpreter that has vLLM: builds one engine after the other and generates with each.

    python generate_cases.py FOLDER

FOLDER/cases.json is a list of cases: `name`, `model` (a directory), `prompts` (token ids), and by choice `options` (of vllm.LLM),
`tokens` (how many, 14), `calibrate` (token ids that choose the compensated channels), `channels` (the choice itself), `record` (whether
every rounded activation is kept; the prompts then run one after the other) and `probe` (ends of module names whose inputs and outputs are
kept). Writes FOLDER/NAME.json with the answers, or with the line of the error, and what was kept as FOLDER/NAME.npz.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

HOOKS = "rollout_bridge.vllm_plugin.capture.hooks"
FIXED = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "enable_prefix_caching": False, "seed": 0}


class Recorder(ModuleType):
    """Stands where the capture's hooks stand, and keeps what they are shown."""

    def __init__(self) -> None:
        super().__init__(HOOKS)
        self.rows: dict[str, list[np.ndarray]] = {}
        self.recording = False

    def active(self) -> bool:
        return self.recording

    def observe(self, site: str, layer: int, quantized: Any, x: torch.Tensor) -> Any:
        values = {"input": x.to(torch.float32)}
        if quantized is not None:
            values |= {"codes": quantized.codes, "scales": quantized.scales}
        for part, tensor in values.items():
            self.rows.setdefault(f"{site}.{layer}.{part}", []).append(tensor.cpu().numpy().copy())
        return quantized


def generate(case: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    """Greedy tokens and their log-probabilities, and what the engine says it executed."""
    from rollout_bridge.vllm_plugin.capabilities import capabilities
    from rollout_bridge.vllm_plugin.channels import calibrate, chosen_channels, set_channels

    engine = LLM(case["model"], **FIXED | case.get("options", {}))
    if "calibrate" in case:
        recorder.recording = case.get("record", False)
        calibrate(engine, case["calibrate"])
    if "channels" in case:
        set_channels(engine, case["channels"])
    parameters = SamplingParams(temperature=0.0, max_tokens=case.get("tokens", 14), ignore_eos=True, logprobs=0, detokenize=False)
    recorder.recording = case.get("record", False)
    engine.apply_model(lambda model: probe(model, tuple(case.get("probe", ())), recorder))
    prompts = [{"prompt_token_ids": prompt} for prompt in case["prompts"]]
    batches = [[prompt] for prompt in prompts] if recorder.recording else [prompts]
    found = [one for batch in batches for one in engine.generate(batch, parameters, use_tqdm=False)]
    recorder.recording = False
    answers = [
        {
            "tokens": list(one.outputs[0].token_ids),
            "logprobs": [step[token].logprob for token, step in zip(one.outputs[0].token_ids, one.outputs[0].logprobs, strict=True)],
        }
        for one in found
    ]
    return {"answers": answers, "capabilities": capabilities(engine), "channels": chosen_channels(engine)}


def probe(model: torch.nn.Module, ends: tuple[str, ...], recorder: Recorder) -> None:
    """Keeps inputs and outputs of the modules with such names from now on."""

    def keep(name: str, values: Any, outputs: Any) -> None:
        for part, tensor in (("in", values[0]), ("out", outputs[0])):
            recorder.rows.setdefault(f"{name}.{part}", []).append(tensor.to("cpu", torch.float32).numpy().copy())

    for name, layer in model.named_modules():
        if ends and name.endswith(ends):
            layer.register_forward_hook(lambda _, values, outputs, name=name: keep(name, values, outputs))


def last_line(error: BaseException) -> str:
    """The line at the root of an error: pydantic and vLLM wrap what the plugin said."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    """See the module."""
    assert "jax" not in sys.modules and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    recorder = Recorder()
    sys.modules[HOOKS] = recorder
    for case in json.loads((folder / "cases.json").read_text()):
        recorder.rows, recorder.recording = {}, False
        try:
            result = generate(case, recorder)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            result = {"error": last_line(error)}
        (folder / f"{case['name']}.json").write_text(json.dumps(result))
        if recorder.rows:
            np.savez(folder / f"{case['name']}.npz", **{key: np.concatenate(rows) for key, rows in recorder.rows.items()})
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
