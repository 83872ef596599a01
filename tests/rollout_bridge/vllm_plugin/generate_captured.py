"""Runs in the interpreter that has vLLM: generates with a capture.

    python generate_captured.py FOLDER

FOLDER/model as for `generate.py`; FOLDER/capture.json says what to do (`test_capture.py`). Writes FOLDER/captured.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from generate import complete
from vllm import LLM, SamplingParams

from rollout_bridge.vllm_plugin import kv_cache
from rollout_bridge.vllm_plugin.capture import set_version, start_capture, stop_capture
from rollout_bridge.vllm_plugin.replay import start_replay, stop_replay


def disturb_kv(gain: float) -> None:
    """From now on K and V are multiplied before they are rounded, so the engine makes other codes than the trainer."""
    rounded = kv_cache._rounded
    kv_cache._rounded = lambda layer, side, x, multiplier: rounded(layer, side, gain * x, multiplier)


def generate(engine: LLM, prompts: list[list[int]], samples: list[list[Any]], audited: list[int], max_tokens: int) -> list[dict[str, Any]]:
    """Every answer of every prompt, with the sample it belongs to; `samples` has one id for each answer of a prompt."""
    parameters = [
        SamplingParams(
            n=len(ids),
            temperature=1.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            extra_args={"trace_jax": [ids if len(ids) > 1 else ids[0], 2, index in audited]},
        )
        for index, ids in enumerate(samples)
    ]
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    return [
        {
            "prompt": index,
            "sample": int(samples[index][answer.index]),
            "tokens": list(answer.token_ids),
            "logprobs": [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)],
        }
        for index, one in enumerate(found)
        for answer in one.outputs
    ]


def seconds(engine: LLM, prompts: list[list[int]], samples: list[list[Any]] | None) -> float:
    """Processor time of the shorter of two greedy generations, which does not depend on what else the machine does."""
    base = dict(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    keys = [None] * len(prompts) if samples is None else [{"trace_jax": [ids[0], 0]} for ids in samples]
    times = []
    for _ in range(2):
        start = time.process_time()
        parameters = [SamplingParams(**base, extra_args=extra) for extra in keys]
        engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        times.append(time.process_time() - start)
    return min(times)


def refusals(engine: LLM, ring: str, plan: dict[str, Any]) -> list[str]:
    """What a capture says that cannot start."""
    messages = []
    for paths, changed in (([ring, ring], plan), (ring, plan | {"kind": "bits"}), (ring, plan)):
        try:
            start_capture(engine, paths, changed)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


def main(folder: Path) -> None:
    """See the module."""
    assert "jax" not in sys.modules
    complete(folder / "model")
    task = json.loads((folder / "capture.json").read_text())
    engine = LLM(
        str(folder / "model"),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        enable_prefix_caching=False,
        async_scheduling=False,
        seed=0,
        logprobs_mode="processed_logprobs",
        **task["engine"],
    )
    prompts = task["prompts"]
    result: dict[str, Any] = {"seconds_without": seconds(engine, prompts, None)}
    answers = []
    for run in task["runs"]:
        start_capture(engine, run["ring"], run["plan"])
        set_version(engine, run["version"])
        answers.append(generate(engine, prompts, run["samples"], run["audited"], run["max_tokens"]))
        if "seconds_with" not in result:
            result["refusals"] = refusals(engine, run["ring"], run["plan"])
            result["seconds_with"] = seconds(engine, prompts, run["samples"])
        stop_capture(engine)
    stop_capture(engine)
    (folder / "captured.part").write_text(json.dumps(result | {"answers": answers}))
    (folder / "captured.part").rename(folder / "captured.json")
    (folder / "replayed.json").write_text(json.dumps(replays(engine, prompts, task["runs"][0]["samples"], answers[0], task["replay"])))


def scored(engine: LLM, rows: list[list[int]], samples: list[str]) -> list[list[float]]:
    """Log-probs of all tokens but the first, of sequences that are given whole."""
    parameters = [SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, extra_args={"trace_jax": [one, 2]}) for one in samples]
    found = engine.generate([{"prompt_token_ids": row} for row in rows], parameters, use_tqdm=False)
    return [
        [step[token].logprob for token, step in zip(row[1:], one.prompt_logprobs[1:], strict=True)]
        for row, one in zip(rows, found, strict=True)
    ]


def replays(engine: LLM, prompts: list[list[int]], samples: list[list[Any]], answers: list[dict[str, Any]], ring: str) -> dict[str, Any]:
    """The log-probs of the first run's sequences: as they are, and with K and V disturbed, under the record and without it."""
    rows = [[*prompts[answer["prompt"]], *answer["tokens"]] for answer in answers]
    ids = [str(answer["sample"]) for answer in answers]
    start_replay(engine, ring)
    result = {"recorded": scored(engine, rows, ids)}
    disturb_kv(1.2)
    result["disturbed, recorded"] = scored(engine, rows, ids)
    stop_replay(engine)
    result["disturbed"] = scored(engine, rows, ids)
    return result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
