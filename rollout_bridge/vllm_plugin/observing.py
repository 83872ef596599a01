"""Where a capture looks on. A module of its own, so that what rounds does not depend on the capture."""

import sys
from collections.abc import Callable
from typing import Any

HOOKS = "rollout_bridge.vllm_plugin.capture.hooks"


def observer() -> Callable[[str, int, Any, Any], Any] | None:
    """`hooks.observe(site, layer, quantized, x)` while a capture is active, else None; one that was never imported costs nothing.

    `quantized` has one row a token and is None where a site does not round; what comes back is to be used, in a replay other codes.
    """
    hooks = sys.modules.get(HOOKS)
    return hooks.observe if hooks is not None and hooks.active() else None


def layer_id(name: str) -> int:
    """The layer's number in a module name such as `model.layers.3.self_attn.attn`."""
    parts = name.split(".")
    return int(parts[parts.index("layers") + 1])
