"""Runs in the interpreter that has vLLM: takes weight updates as a worker does, and says how long each one took.

    python -m rollout_bridge.vllm_plugin.weights.timed_updates MODEL RING

Takes one update for every line of its input, which is the version, and answers with a line that begins with `ANSWER`.
`rollout_bridge.engine.sync_throughput` starts it.
"""

import json
import sys

from rollout_bridge.vllm_plugin.serve.arguments import FIXED
from rollout_bridge.vllm_plugin.weights.update import update_timing, update_weights

ANSWER = "answer "
"""vLLM writes lines of its own."""

_TIMEOUT_S = 600.0
_SMALL = {"max_model_len": 64, "max_num_seqs": 1, "kv_cache_memory_bytes": 1 << 24}


def main(model: str, ring: str) -> None:
    """See the module."""
    from vllm import LLM  # the trainer reads `ANSWER` and has no vllm

    llm = LLM(model, dtype="bfloat16", **_SMALL, **FIXED)
    _answer({})
    for line in sys.stdin:
        ack = update_weights(llm, ring, int(line), _TIMEOUT_S)
        _answer({"ack": ack, **(update_timing(llm) or {})})


def _answer(values: dict) -> None:
    print(ANSWER + json.dumps(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
