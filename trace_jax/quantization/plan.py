"""The quantization plan: which tensor of a forward pass is rounded, in which format, and who decides the rounding.

A plan is static (hashable) and describes one path. The rollout engine and the trainer each have one; for the paths to
agree the formats must be equal, which is why the trainer's plan takes its formats from the rollout's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal["bf16", "fp8", "nvfp4", "mxfp4"]
"""Number format of a tensor; `bf16` means it is not rounded beyond the compute dtype."""

WeightFormat = Literal["bf16", "fp8", "nvfp4", "mxfp4", "nvfp4_4over6"]
"""Format of the experts' weights; `nvfp4_4over6` is NVFP4 with the better of two scales a block (`pallas_kernels.four_over_six`)."""

Rounding = Literal["none", "rtn", "guided"]
"""`none`: not rounded; `rtn`: to nearest under the path's own scale; `guided`: as the rollout's record says."""

BLOCK_FORMATS = ("nvfp4", "mxfp4")
"""Formats with block scales and FP4 codes, the ones a record can hold."""


def block_format_name(fmt: str) -> str | None:
    """The FP4 format in which weights are stored; None for one without codes."""
    name = "nvfp4" if fmt == "nvfp4_4over6" else fmt
    return name if name in BLOCK_FORMATS else None


SITES = ("expert_input", "down_input", "k", "v")
"""Activation sites: input of gate/up, input of the down projection, keys after RoPE, values."""

RecordedSite = Literal["expert_input", "k", "v"]
"""A site that a guidance record can hold; the down-projection input is rounded to nearest on both paths."""

RECORDED_SITES: tuple[RecordedSite, ...] = get_args(RecordedSite)


@dataclass(frozen=True)
class SitePlan:
    """How one activation site is rounded."""

    format: Format = "bf16"
    guided: bool = False


@dataclass(frozen=True)
class QuantPlan:
    """How one path rounds.

    Args:
      weights: format of the routed experts' weights. The engine's own plan says `bf16`, because it receives weights
        that are already quantized.
      expert_input, down_input, k, v: one plan per activation site.
      per_token: whether activation and KV multipliers are computed from each token; otherwise they are static.
    """

    weights: WeightFormat = "bf16"
    expert_input: SitePlan = SitePlan()
    down_input: SitePlan = SitePlan()
    k: SitePlan = SitePlan()
    v: SitePlan = SitePlan()
    per_token: bool = False

    def site(self, name: str) -> SitePlan:
        """The plan of a site by name."""
        return getattr(self, name)

    @property
    def guided_sites(self) -> tuple[str, ...]:
        """Names of the sites that follow the rollout's record."""
        return tuple(name for name in SITES if self.site(name).guided)


UNQUANTIZED = QuantPlan()
"""Nothing is rounded."""


def rollout_plan(weights: WeightFormat, activations: Format, k: Format, v: Format, per_token: bool = False) -> QuantPlan:
    """The plan of a rollout with these formats, every site rounded to nearest."""
    activation = SitePlan(activations)
    return QuantPlan(weights, activation, activation, SitePlan(k), SitePlan(v), per_token)


def trainer_plan(rollout: QuantPlan, weights: Rounding, activations: Rounding, down_input: Rounding, kv_cache: Rounding) -> QuantPlan:
    """The trainer's plan for a rollout plan: formats from the rollout, rounding as asked.

    Args:
      rollout: the plan of the rollout that produces the data.
      weights: `none` or `rtn`.
      activations, down_input, kv_cache: rounding of the expert input, of the down-projection input, of K and V.
    """

    def site(plan: SitePlan, rounding: Rounding) -> SitePlan:
        if rounding == "none" or plan.format == "bf16":
            return SitePlan()
        return SitePlan(plan.format, guided=rounding == "guided" and plan.format in BLOCK_FORMATS)

    return QuantPlan(
        weights=rollout.weights if weights == "rtn" else "bf16",
        expert_input=site(rollout.expert_input, activations),
        down_input=site(rollout.down_input, down_input),
        k=site(rollout.k, kv_cache),
        v=site(rollout.v, kv_cache),
        per_token=rollout.per_token,
    )
