"""A dense checkpoint seen as a mixture of experts that computes the same function ("sparse upcycling").

Every expert is a copy of the dense layer, so it does not matter which ones the router picks: the mixing weights of the picked experts sum
to one. Or the dense layer is split: expert `e` holds slice `e % k` of its hidden units, with the down projection times k, and the k
experts of one copy have the same row in the router, so that all slices of a copy are picked together and each weighs 1/k.

Nothing is held in memory: an expert is cut from the dense tensor when it is read.

Source: Komatsuzaki et al., Sparse Upcycling, arXiv 2212.05055; splitting with equal routes: He et al., Upcycling Large Language Models into
Mixture of Experts, arXiv 2410.07524.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from trace_jax.errors import UserError
from trace_jax.models.hf_tensors import Source

ROUTER_DEVIATION = 0.02
"""Standard deviation of the router's rows: logits are near zero at first, so that tokens spread over the experts."""


CARRIED_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings", "hidden_act", "torch_dtype", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of config.json that mean the same for the mixture; a dense model that needs others has tensors that the mixture refuses."""


@dataclass(frozen=True)
class Upcycling:
    """How a dense layer becomes a mixture.

    Args:
      num_experts: E.
      experts_per_token: k.
      split: whether each expert holds 1/k of the dense layer's hidden units instead of all.
      seed: of the router.

    Raises:
      UserError: more experts per token than experts, or a split whose copies are not whole.
    """

    num_experts: int
    experts_per_token: int = 2
    split: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise UserError(
                f"--upcycle {self.num_experts} with {self.experts_per_token} experts per token; write 1 to {self.num_experts} per token"
            )
        if self.split and self.num_experts % self.experts_per_token:
            raise UserError(
                f"--split needs whole copies of the dense layer: {self.num_experts} experts are no multiple of {self.experts_per_token} "
                "a token"
            )


@dataclass(frozen=True)
class Target:
    """A mixture family's names, for a dense family whose attention it shares."""

    model_type: str
    architecture: str
    router: str
    expert: str
    projections: dict[str, str]
    values: dict[str, Any]

    def config(self, dense: dict[str, Any], how: Upcycling) -> dict[str, Any]:
        """config.json of the mixture.

        Raises:
          UserError: the hidden units do not divide into the slices.
        """
        hidden = dense["intermediate_size"]
        if how.split and hidden % how.experts_per_token:
            raise UserError(f"--split cannot cut intermediate_size={hidden} into {how.experts_per_token} equal slices")
        sizes = {"hidden": hidden // how.experts_per_token if how.split else hidden, "experts": how.num_experts, "k": how.experts_per_token}
        added = {key: sizes.get(value, value) if isinstance(value, str) else value for key, value in self.values.items()}
        carried = {key: dense[key] for key in CARRIED_KEYS if key in dense}
        return {**carried, "model_type": self.model_type, "architectures": [self.architecture], **added}


TARGETS = {
    "llama": Target(
        "mixtral",
        "MixtralForCausalLM",
        "block_sparse_moe.gate.weight",
        "block_sparse_moe.experts.{}.{}.weight",
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        {"intermediate_size": "hidden", "num_local_experts": "experts", "num_experts_per_tok": "k", "sliding_window": None},
    ),
    "qwen3": Target(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "mlp.gate.weight",
        "mlp.experts.{}.{}.weight",
        {name: name for name in ("gate_proj", "up_proj", "down_proj")},
        {"moe_intermediate_size": "hidden", "num_experts": "experts", "num_experts_per_tok": "k", "norm_topk_prob": True},
    ),
}
"""Dense `model_type` -> the mixture that it becomes."""


def upcycling_target(family: str) -> Target:
    """The mixture that a dense family becomes.

    Raises:
      UserError: there is none.
    """
    if family not in TARGETS:
        raise UserError(f"--upcycle takes a dense checkpoint of {' or '.join(TARGETS)}, not of {family}; leave it out")
    return TARGETS[family]


class UpcycledFiles:
    """The tensors of a dense checkpoint under the names and shapes of a mixture; read as those.

    Args:
      dense: the open checkpoint.
      target: names of the mixture.
      layers: number of decoder layers.
      how: number and kind of experts.
    """

    def __init__(self, dense: Source, target: Target, layers: int, how: Upcycling):
        self._dense, self._how = dense, how
        self._experts: dict[str, tuple[str, int]] = {}
        self._routers: dict[str, int] = {}
        replaced = set()
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            self._routers[f"{prefix}.{target.router}"] = layer
            for name, ours in target.projections.items():
                source = f"{prefix}.mlp.{name}.weight"
                replaced.add(source)
                for expert in range(how.num_experts):
                    self._experts[f"{prefix}.{target.expert.format(expert, ours)}"] = (source, expert)
        self._kept = dense.names - replaced
        self._width = dense.shape("model.embed_tokens.weight")[1]

    @property
    def directory(self) -> Path:
        """Where the dense checkpoint lies."""
        return self._dense.directory

    @property
    def names(self) -> set[str]:
        """Names of all tensors of the mixture."""
        return {*self._kept, *self._experts, *self._routers}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        if name in self._routers:
            return self._how.num_experts, self._width
        if name not in self._experts:
            return self._dense.shape(name)
        source, _ = self._experts[name]
        rows, columns = self._dense.shape(source)
        if not self._how.split:
            return rows, columns
        return (rows, columns // self._how.experts_per_token) if _is_down(source) else (rows // self._how.experts_per_token, columns)

    def read(self, name: str) -> Float[np.ndarray, "*shape"]:
        """One tensor as float32.

        Raises:
          UserError: the dense tensor cannot be read.
        """
        if name in self._routers:
            return self._router(self._routers[name])
        if name not in self._experts:
            return self._dense.read(name)
        source, expert = self._experts[name]
        weight = self._dense.read(source)
        if not self._how.split:
            return weight
        slices = self._how.experts_per_token
        part = np.split(weight, slices, axis=1 if _is_down(source) else 0)[expert % slices]
        return part * np.float32(slices) if _is_down(source) else part

    def _router(self, layer: int) -> Float[np.ndarray, "E D"]:
        how = self._how
        rows = how.num_experts // how.experts_per_token if how.split else how.num_experts
        drawn = np.random.default_rng((how.seed, layer)).standard_normal((rows, self._width), np.float32) * np.float32(ROUTER_DEVIATION)
        return np.repeat(drawn, how.experts_per_token, axis=0) if how.split else drawn


def _is_down(name: str) -> bool:
    return name.endswith(".down_proj.weight")
