"""Replay of recorded trajectories inside a vLLM worker: the same experts, and the recorded codes where the engine would round.

    start_replay(llm, ring_path)     takes every record of the ring, until its writer closes it
    ...                              requests with the whole sequence as prompt and prompt_logprobs=0 return its log-probs
    stop_replay(llm)

Records have the form of a capture's (`vllm_plugin.capture.collector`), with kind `codes`. Rows without a record round as always.
"""

from rollout_bridge.vllm_plugin.replay.attach import start_replay, stop_replay

__all__ = ["start_replay", "stop_replay"]
