"""Weights of the running vLLM replaced in place, from a ring that the trainer writes: all of an update, or nothing.

1. `receive` reads the records of one update into host memory, checks every tensor against `expected`, and computes the checksum.
2. Only a complete and flawless update is loaded, whole layers at a time, by vLLM's own loader (`transfer_engine`, which imports vllm).
3. The prefix cache is reset, requests that run start over with the new weights, and the KV cache is zeroed, since a value that is not
   finite would stay in it and spread.

Held: one update in host memory until it is loaded, released layer by layer, and in vLLM one layer more than its weights.
"""

from rollout_bridge.vllm_plugin.weights.update import update_timing, update_weights, weights_checksum

__all__ = ["update_timing", "update_weights", "weights_checksum"]
