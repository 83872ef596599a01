"""Capture of expert routes and of the guidance record inside a vLLM worker: what was rounded, how, and for which token.

    start_capture(llm, ring_path, plan)      plan: see `CapturePlan.parse`
    set_version(llm, 3)                      after each weight update
    stop_capture(llm)

1. `attach` wraps the model runner's forward pass and sets the routers' capture functions.
2. At the start of a forward `requests` says which sample and position every row belongs to, and how often it was computed before.
3. During the forward the rounding sites call `hooks`, which hand the codes and scales they use to the `collector`.
4. After it the collector sends the rows of the forward as one record (`collector` names its arrays).

Rows of requests without a sample (`requests.sample_key`) are left out. Imports vllm only when a capture starts.
"""

from rollout_bridge.vllm_plugin.capture.attach import set_version, start_capture, stop_capture
from rollout_bridge.vllm_plugin.capture.plan import CapturePlan

__all__ = ["CapturePlan", "set_version", "start_capture", "stop_capture"]
