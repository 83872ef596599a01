"""What each `method` and each `algorithm.name` stands for. A preset fills only what neither the file nor the command line sets."""

from __future__ import annotations

import copy
from typing import Any

from trace_jax.errors import UserError

_NOT_QUANTIZED = {"weights": "none", "activations": "none", "down_input": "none", "kv_cache": "none"}
_NEAREST = {"weights": "rtn", "activations": "rtn", "down_input": "rtn", "kv_cache": "rtn"}
_WEIGHTS = {"weights": "rtn", "activations": "none", "down_input": "none", "kv_cache": "none"}
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
    # The same in FP8: weights, activations and cache.
    "fp8": {
        "rollout": {"weights": "fp8", "activations": "fp8", "kv_cache": {"k": "fp8", "v": "fp8"}},
        "train_quant": _NEAREST,
        "guidance": {"record": "none"},
    },
    # FP4 rollout, trainer rounds the weights alone.
    "qat_w4a16": {"train_quant": _WEIGHTS, "guidance": {"record": "none"}},
    # QUADS, arXiv 2607.15810: the rollout compensates half of the experts' input channels, the trainer leaves these inputs unrounded.
    # The paper rounds no cache; where the rollout does, the trainer does.
    "quads": {
        "rollout": {"residual_compensation": {"fraction": 0.5}},
        "train_quant": _WEIGHTS | {"kv_cache": "rtn"},
        "guidance": {"record": "none"},
    },
    # QaRL, arXiv 2604.07853: the trainer rounds like the rollout, and the objective bounds what is left.
    "qarl": {"train_quant": _NEAREST, "guidance": {"record": "none"}, "algorithm": {"name": "trust_band"}},
    # FP4 rollout, trainer guided by one mantissa bit and the scales in the deeper half.
    "trace": {"train_quant": _GUIDED, "guidance": {"record": "mantissa", "layers": "last_half"}},
    # Upper bound of guidance: all codes of all layers.
    "trace_full": {"train_quant": _GUIDED, "guidance": {"record": "codes", "layers": "all"}},
    # Scales only: the trainer rounds to nearest under the rollout's scales.
    "trace_scales": {"train_quant": _GUIDED, "guidance": {"record": "scales", "layers": "last_half"}},
}
"""Method name -> the keys it sets."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    # Liu et al., arXiv 2503.20783: no division by the group's std, nor by the length of an answer.
    "dr_grpo": {"normalize_std": False, "aggregation": "seq_mean_token_sum_norm"},
    # Yu et al., arXiv 2503.14476: clip-higher, token mean, dynamic sampling, overlong shaping.
    "dapo": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "token_mean",
        "filter_groups": {"enable": True},
        "overlong_buffer": {"enable": True},
    },
    # Zheng et al., arXiv 2507.18071: one ratio per sequence, bounds of section 5.1.
    "gspo": {"ratio_level": "geometric", "clip_low": 3e-4, "clip_high": 4e-4, "aggregation": "seq_mean_token_mean"},
    # MiniMax-M1, arXiv 2506.13585: no lower bound; the upper one as in the examples of verl and NeMo RL.
    "cispo": {"loss": "cispo", "clip_low": 1.0, "clip_high": 5.0},
    # QaRL's TBPO, arXiv 2604.07853: a band for negative advantages, and the rollout's gap as one weight per sequence.
    "trust_band": {
        "ratio_level": "geometric",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_c": 1.0007,
        "aggregation": "seq_mean_token_mean",
        "correction": {"kind": "tis", "level": "geometric", "cap": 2.0},
    },
}
"""Algorithm name -> the keys of `algorithm` it sets."""


def preset(method: object) -> dict[str, Any]:
    """The nested keys of a method, as a fresh mapping.

    Raises:
      UserError: there is no such method.
    """
    if not isinstance(method, str) or method not in METHODS:
        raise UserError(f"method is {method!r}; write one of: {', '.join(METHODS)}")
    return copy.deepcopy(METHODS[method])


def algorithm_preset(name: object) -> dict[str, Any]:
    """The nested keys of an algorithm, as a fresh mapping; nothing for a name that does not exist, which the schema refuses."""
    return {"algorithm": copy.deepcopy(ALGORITHMS[name])} if isinstance(name, str) and name in ALGORITHMS else {}
