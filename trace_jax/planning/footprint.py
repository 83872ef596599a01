"""Bytes of a model, its training and its rollout."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from pallas_kernels import block_format
from trace_jax.guidance.site_record import RecordKind, row_bytes
from trace_jax.models.policy import Policy
from trace_jax.models.registry import key_map
from trace_jax.quantization.plan import RECORDED_SITES, block_format_name

PLAIN_BYTES = {"bf16": 2.0, "fp8": 1.0}


def bytes_per_value(fmt: str) -> float:
    """Bytes of a value and its share of the block scale; the FP8 scale of 128 values or more is left out."""
    name = block_format_name(fmt)
    if name is not None:
        return 0.5 + 1 / block_format(name).block
    return PLAIN_BYTES[fmt]


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Args:
      experts: of all routed experts.
      rest: of everything else, the embedding and the head among it.
      table: of the embedding, of which a token reads one row.
      active: that a token is multiplied with: k of E experts, and the rest without the embedding.
    """

    experts: int
    rest: int
    table: int
    active: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.experts + self.rest


@functools.cache
def parameters_of(policy: Policy) -> Parameters:
    """Counts by the shapes of the model's checkpoint."""
    config = policy.config
    sizes = {True: 0, False: 0}
    for entry in key_map(policy.family, config):
        sizes[entry.is_expert] += math.prod(entry.shape)
    table = config.vocab_size * config.hidden_size
    used = sizes[True] * config.experts_per_token // config.num_experts if config.num_experts else 0
    return Parameters(sizes[True], sizes[False], table, used + sizes[False] - (0 if config.tie_embeddings else table))


def weight_bytes(parameters: Parameters, experts: str) -> float:
    """Bytes of the weights in an engine: the routed experts in a format, everything else in BF16."""
    return parameters.experts * bytes_per_value(experts) + 2.0 * parameters.rest


def training_bytes(parameters: Parameters, experts: str) -> dict[str, float]:
    """Bytes that training holds over all devices, without activations; the names are those of `train --dry-run`."""
    total = parameters.total
    return {
        "masters and Adam moments (float32)": 12.0 * total,
        "gradient and its sum (float32)": 8.0 * total,
        "new masters and moments beside the old in an update (float32)": 12.0 * total,
        "experts as the trainer rounds them (bf16)": 0.0 if experts == "bf16" else 2.0 * parameters.experts,
    }


def cache_bytes_per_token(policy: Policy, fmt: str) -> float:
    """Bytes of one token in the KV cache of all layers; a latent cache (DeepSeek-V3) stays BF16, recurrent states have none."""
    heads, key, value = policy.config.cache_shape
    stored = fmt if policy.config.layers_of("k") else "bf16"
    return len(policy.config.cache_layer_ids) * heads * (key + value) * bytes_per_value(stored)


def record_bytes(policy: Policy, fmt: str, kind: RecordKind, layers: tuple[int, ...]) -> dict[str, int]:
    """Bytes per token of the guidance record: data and scales of every site, and their sum (`total`).

    Args:
      fmt: `nvfp4` or `mxfp4`.
      kind: what is kept of a value.
      layers: global ids of the recorded layers.
    """
    sizes = {}
    for name in RECORDED_SITES:
        site = policy.config.sites.get(name)
        if site is not None:
            vectors = len(set(layers) & set(site.layer_ids)) * math.prod(site.lead)
            sizes[name] = vectors * row_bytes(kind, fmt, site.width)
    return sizes | {"total": sum(sizes.values())}
