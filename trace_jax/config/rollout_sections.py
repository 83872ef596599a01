"""Sections about the rollout, its rounding and its record: `rollout`, `train_quant`, `guidance`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from trace_jax.config.layer_spec import LayerSpec, parse_layers
from trace_jax.config.ray_section import RaySection
from trace_jax.config.section import Count, Positive, Section, distinct
from trace_jax.config.vllm_section import VllmSection
from trace_jax.quantization.plan import RECORDED_SITES, Format, RecordedSite, WeightFormat


class KvCacheSection(Section):
    """Formats of the KV cache: keys after RoPE, and values."""

    k: Format = "nvfp4"
    v: Format = "nvfp4"


class ResidualSection(Section):
    """Residual activation compensation (QUADS): what rounding leaves over of an expert's input is rounded as well and multiplied, in
    this share of the input channels, those with the largest residuals."""

    fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    selection: Literal["l2"] = "l2"


class RolloutSection(Section):
    """How answers are generated.

    Args:
      engine: `jax` (embedded) or the name of an installed engine.
      launcher: `process` runs one engine from the trainer's process, `ray` runs `engines` of them on a Ray cluster.
      engines: how many; prompts are divided among them by length.
      weights, activations, kv_cache: formats of the routed experts' weights and inputs and of the cache; `nvfp4_4over6`, for weights
        alone, is NVFP4 with the better of two scales a block.
      scope: which linear layers are quantized.
      activation_scale: `static` (calibrated, constant for the run) or `per_token`.
      residual_compensation: second rounding of what the first one left over of the experts' inputs.
      group_size: answers per prompt.
      prompts_per_step: prompts of one training step.
      max_new_tokens: limit of one answer in tokens.
      max_prompt_tokens: longest prompt accepted; null is the model's context less `max_new_tokens`.
      temperature: of sampling; 0 is greedy.
      top_p, top_k: truncation of the distribution; 1.0 and -1 switch it off.
      max_batch: sequences that an engine generates at the same time; null is all that it has.
      partial_sums: the embedded engine sums attention output and experts in this many shares, each rounded to the compute
        dtype, as an engine spread over so many devices does; 1 is the trainer's own arithmetic.
      vllm: how vLLM is run, with `engine: vllm`.
      ray: how engines are placed and replaced, with `launcher: ray`.
    """

    engine: str = "jax"
    launcher: Literal["process", "ray"] = "process"
    engines: Positive = 1
    weights: WeightFormat = "nvfp4"
    activations: Format = "nvfp4"
    kv_cache: KvCacheSection = KvCacheSection()
    scope: Literal["routed_experts"] = "routed_experts"
    activation_scale: Literal["static", "per_token"] = "static"
    residual_compensation: ResidualSection = ResidualSection()
    group_size: Positive = 8
    prompts_per_step: Positive = 16
    max_new_tokens: Positive = 64
    max_prompt_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: int = -1
    max_batch: Positive | None = None
    partial_sums: Positive = 1
    vllm: VllmSection = VllmSection()
    ray: RaySection = RaySection()

    def format_of(self, site: str) -> Format:
        """Format of a recordable site: `expert_input`, `k` or `v`."""
        formats: dict[str, Format] = {"expert_input": self.activations, "k": self.kv_cache.k, "v": self.kv_cache.v}
        return formats[site]


class TrainQuantSection(Section):
    """How the trainer's forward pass rounds; formats are the rollout's.

    Args:
      weights: routed experts' weights.
      activations: input of the experts' gate/up projection.
      down_input: input of the experts' down projection; it is not recorded, so it cannot be guided.
      kv_cache: K and V.
    """

    weights: Literal["none", "rtn"] = "rtn"
    activations: Literal["none", "rtn", "guided"] = "guided"
    down_input: Literal["none", "rtn"] = "rtn"
    kv_cache: Literal["none", "rtn", "guided"] = "guided"


class AuditSection(Section):
    """Sequences recorded with full codes at all layers, for diagnosis: every so many steps (0: never), and how many."""

    every: Count = 10
    sequences: Positive = 4


class GuidanceSection(Section):
    """What the rollout records for the trainer.

    Args:
      record: `scales`, `mantissa` (one bit and the scales), `codes`, or `none`.
      layers: `all`, `last_half`, `last:N`, `first:N`, or a list of global layer ids.
      sites: which activation sites; a site that the rollout does not round to FP4 records nothing.
      audit: full-code records for diagnosis.
      cache_budget_mb: most MiB on disk of the cache that `rollout --save-cache` writes; training keeps no cache.
    """

    record: Literal["none", "scales", "mantissa", "codes"] = "mantissa"
    layers: Annotated[LayerSpec, BeforeValidator(parse_layers)] = "last_half"
    sites: Annotated[tuple[RecordedSite, ...], Field(strict=False), AfterValidator(distinct)] = RECORDED_SITES
    audit: AuditSection = AuditSection()
    cache_budget_mb: Positive = 2048
