"""From the `start` message to vLLM."""

from rollout_bridge.vllm_plugin.serve.channel import Message
from rollout_bridge.vllm_plugin.serve.generator import Generator
from rollout_bridge.vllm_plugin.versions import require_supported


def build(start: Message) -> Generator:
    """A generator that has loaded the model.

    Raises:
      RuntimeError: there is no vLLM, or one that is not supported.
      Exception: whatever vLLM says about a model or setting that it does not take.
    """
    require_supported()
    from rollout_bridge.vllm_plugin.serve.llm import VllmGenerator

    return VllmGenerator(start)
