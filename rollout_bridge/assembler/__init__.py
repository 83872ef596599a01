"""From the rows that a vLLM worker captured to `Routes` and `GuidanceRecord`: the trainer's side of `vllm_plugin.capture`.

    assembler = Assembler(layout)
    assembler.expect(sample, attempt)                # when the request is submitted
    assembler.take(received.arrays)                  # every record of the ring
    assembled = assembler.finish(sample, attempt, num_tokens)

`layout` says which arrays come and what is made of them, `fields` how they are divided into parts, `storage` keeps rows until their
sample ends, `assembler` sorts them by sample.
"""

from rollout_bridge.assembler.assembler import Assembled, Assembler, Counts
from rollout_bridge.assembler.fields import SiteLayout
from rollout_bridge.assembler.layout import Layout

__all__ = ["Assembled", "Assembler", "Counts", "Layout", "SiteLayout"]
