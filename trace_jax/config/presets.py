"""What each `method` stands for. A preset fills only what neither the file nor the command line sets."""

from __future__ import annotations

import copy
from typing import Any

from trace_jax.errors import UserError

_NOT_QUANTIZED = {"weights": "none", "activations": "none", "down_input": "none", "kv_cache": "none"}
_NEAREST = {"weights": "rtn", "activations": "rtn", "down_input": "rtn", "kv_cache": "rtn"}
_GUIDED = {"weights": "rtn", "activations": "guided", "down_input": "rtn", "kv_cache": "guided"}

METHODS: dict[str, dict[str, Any]] = {
    # No quantization anywhere: the reference for reward and for the gap that remains.
    "bf16": {
        "rollout": {"weights": "bf16", "activations": "bf16", "kv_cache": {"k": "bf16", "v": "bf16"}},
        "train_quant": _NOT_QUANTIZED,
        "guidance": {"record": "none"},
    },
    # FP4 rollout, unquantized trainer.
    "naive": {"train_quant": _NOT_QUANTIZED, "guidance": {"record": "none"}},
    # FP4 rollout, trainer rounds to nearest by itself.
    "qat": {"train_quant": _NEAREST, "guidance": {"record": "none"}},
    # FP4 rollout, trainer guided by one mantissa bit and the scales in the deeper half.
    "trace": {"train_quant": _GUIDED, "guidance": {"record": "mantissa", "layers": "last_half"}},
    # Upper bound of guidance: all codes of all layers.
    "trace_full": {"train_quant": _GUIDED, "guidance": {"record": "codes", "layers": "all"}},
    # Scales only: the trainer rounds to nearest under the rollout's scales.
    "trace_scales": {"train_quant": _GUIDED, "guidance": {"record": "scales", "layers": "last_half"}},
}
"""Method name -> the keys it sets."""


def preset(method: object) -> dict[str, Any]:
    """The nested keys of a method, as a fresh mapping.

    Raises:
      UserError: there is no such method.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"method is {method!r}; write one of: {', '.join(METHODS)}")
    return copy.deepcopy(METHODS[method])
