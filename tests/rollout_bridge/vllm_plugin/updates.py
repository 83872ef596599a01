"""Runs in the interpreter that has vLLM: generates, takes weight updates from a ring, generates again.

    python updates.py FOLDER RING

FOLDER/settings.json: arguments of `LLM`, prompts, and steps in order, each a list:
    ["start", NAME]        a new vLLM with the checkpoint FOLDER/NAME, completed as in generate.py if it has experts.safetensors
    ["generate"]           greedy tokens and their log-probabilities
    ["cold"]               the same without a prefix cache
    ["update", VERSION]    what `update_weights` returns, or the refusal
    ["interrupted", VERSION]  the same while the prompts are being answered: answers, and how many tokens they had before
    ["multipliers"]        weight_scale_2 of gate and up in every layer, and a checksum over the codes
Writes FOLDER/results.json, one result per step.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from generate import complete
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from rollout_bridge.vllm_plugin.weights import update_timing, update_weights, weights_checksum
from rollout_bridge.vllm_plugin.weights.errors import WeightsRefused


def _parameters() -> SamplingParams:
    """New ones for every use: vLLM changes what it is given."""
    return SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=0, detokenize=False)


class Program:
    """The steps, each a method that returns its result."""

    def __init__(self, folder: Path, ring: str, llm: dict[str, Any], prompts: list[list[int]]) -> None:
        self._folder, self._ring, self._arguments = folder, ring, llm
        self._prompts = [{"prompt_token_ids": prompt} for prompt in prompts]

    def start(self, name: str) -> None:
        """A new vLLM in the place of the one before."""
        model = self._folder / name
        if (model / "experts.safetensors").exists():
            complete(model)
        self._llm = None
        cleanup_dist_env_and_memory()
        self._llm = LLM(
            str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=64,
            block_size=32,
            seed=0,
            weight_transfer_config={"backend": "trace_jax"},
            **self._arguments,
        )

    def generate(self) -> list[dict[str, Any]]:
        """Every prompt's answer."""
        return [_answer(one) for one in self._llm.generate(self._prompts, _parameters(), use_tqdm=False)]

    def cold(self) -> list[dict[str, Any]]:
        """Every prompt's answer, with nothing remembered of its tokens."""
        assert self._llm.reset_prefix_cache()
        return self.generate()

    def update(self, version: int) -> dict[str, Any]:
        """Takes an update; the cache is zero afterwards, and after a refusal what it was."""
        before = [cache.clone() for cache in self._caches()]
        assert any(bool(cache.any()) for cache in before) or version == 1
        try:
            ack = update_weights(self._llm, self._ring, version)
        except WeightsRefused as error:
            assert all(torch.equal(cache, old) for cache, old in zip(self._caches(), before, strict=True))
            return {"refused": str(error), "in_use": weights_checksum(self._llm)}
        assert not any(bool(cache.any()) for cache in self._caches())
        assert ack == weights_checksum(self._llm) and ack["version"] == version
        return {"ack": ack, "timing": update_timing(self._llm)}

    def interrupted(self, version: int) -> dict[str, Any]:
        """Takes an update while the prompts are being answered."""
        engine = self._llm.llm_engine
        for number, prompt in enumerate(self._prompts):
            engine.add_request(str(number), prompt, _parameters())
        tokens, done = {}, {}

        def step() -> None:
            for one in engine.step():
                tokens[one.request_id] = len(one.outputs[0].token_ids)
                if one.finished:
                    done[one.request_id] = _answer(one)

        while len(tokens) < len(self._prompts) or min(tokens.values()) < 3:
            step()
        assert not done
        before = [tokens[str(number)] for number in range(len(self._prompts))]
        ack = update_weights(self._llm, self._ring, version)
        while engine.has_unfinished_requests():
            step()
        return {"ack": ack, "before": before, "answers": [done[str(number)] for number in range(len(self._prompts))]}

    def multipliers(self) -> dict[str, Any]:
        """Decode multipliers of gate and up, and a checksum over their codes."""
        experts = [module for module in self._model().modules() if hasattr(module, "w13_weight_scale_2")]
        return {
            "multipliers": [module.w13_weight_scale_2.tolist() for module in experts],
            "codes": [zlib.crc32(module.w13_weight.cpu().numpy().tobytes()) for module in experts],
        }

    def _model(self) -> torch.nn.Module:
        return self._llm.collective_rpc(lambda worker: worker.get_model())[0]

    def _caches(self) -> list[torch.Tensor]:
        return self._llm.collective_rpc(lambda worker: worker.model_runner.kv_caches)[0]


def _answer(one: Any) -> dict[str, Any]:
    (output,) = one.outputs
    logprobs = [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)]
    return {"tokens": list(output.token_ids), "logprobs": logprobs}


def main(folder: Path, ring: str) -> None:
    """See the module."""
    assert "jax" not in sys.modules
    settings = json.loads((folder / "settings.json").read_text())
    program = Program(folder, ring, settings["llm"], settings["prompts"])
    results = [getattr(program, name)(*arguments) for name, *arguments in settings["steps"]]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
