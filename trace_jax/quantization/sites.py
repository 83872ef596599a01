"""Rounding of one activation site inside a layer, with capture of the result.

The same function serves rollout and trainer, so that a recorded code and the trainer's code are defined by one line of
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt8

from pallas_kernels import (
    BlockFormat,
    Guide,
    block_format,
    dequantize,
    fake_quant,
    fake_quant_fp8,
    guided_fake_quant,
    keep_rounding,
    quantize,
    residual_fake_quant,
)
from pallas_kernels.pytrees import register_arrays
from trace_jax.quantization.multipliers import KV_SITES, token_multiplier
from trace_jax.quantization.plan import SitePlan
from trace_jax.sharding.axes import BATCH, per_shard


@register_arrays
@dataclass(frozen=True)
class SiteGuide:
    """The rollout's record of one site for a padded batch; `Ls` recorded layers.

    Args:
      data: packed bits or codes `[Ls, B, T, *lead, bytes]`; None for kind `scales`.
      scales: block-scale bytes `[Ls, B, T, *lead, blocks]`.
      multiplier: float32 `[Ls]` or `[Ls, B, T]`; None for MXFP4.
      slots: int32 `[L]`, position of a layer in the leading axis, -1 where the layer is not recorded.
    """

    data: UInt8[Array, "Ls B T *width"] | None
    scales: UInt8[Array, "Ls B T *blocks"]
    multiplier: Float[Array, "Ls ..."] | None
    slots: Int[Array, " L"]


@register_arrays
@dataclass(frozen=True)
class GuideBatch:
    """The guidance of a padded batch: one `SiteGuide` per recorded site and the tokens that have a record.

    Switching `valid` off everywhere turns the same compiled forward into an unguided one.
    """

    sites: dict[str, SiteGuide]
    valid: Bool[Array, "B T"]
    kind: str = field(metadata={"static": True})

    def of(self, site: str, layer: Int[Array, ""], lead: int) -> Guide | None:
        """The kernel's guide of a site at a (traced) layer; `lead` axes stand between T and the width."""
        guide = self.sites.get(site)
        if guide is None:
            return None
        slot = guide.slots[layer]
        index = jnp.maximum(slot, 0)
        valid = (self.valid & (slot >= 0)).reshape(self.valid.shape + (1,) * lead)
        rows = guide.scales.shape[1:-1]
        multiplier = None
        if guide.multiplier is not None:
            multiplier = guide.multiplier[index]
            multiplier = jnp.broadcast_to(multiplier.reshape(multiplier.shape + (1,) * (len(rows) - multiplier.ndim)), rows)
        data = None if guide.data is None else guide.data[index]
        return Guide(kind=self.kind, data=data, scales=guide.scales[index], multiplier=multiplier, valid=jnp.broadcast_to(valid, rows))


@register_arrays
@dataclass(frozen=True)
class Captured:
    """The engine's own rounding of one site.

    Args:
      codes: packed codes, uint8 `[*rows, ceil(d/2)]`.
      scales: block-scale bytes, uint8 `[*rows, blocks]`.
      multiplier: float32 `[B, T]` when each token has its own, else None.
    """

    codes: UInt8[Array, "*rows bytes"]
    scales: UInt8[Array, "*rows blocks"]
    multiplier: Float[Array, "B T"] | None


def round_site(
    site: str,
    x: Float[Array, "*rows d"],
    plan: SitePlan,
    multiplier: Float[Array, ""] | None,
    *,
    per_token: bool = False,
    guide: Guide | None = None,
    capture: bool = False,
    channels: Int[Array, " c"] | None = None,
) -> tuple[Float[Array, "*rows width"], Captured | None]:
    """Rounds a site as its plan says and returns the codes when asked.

    Args:
      site: name of the site; decides the kind of a per-token multiplier.
      x: values, blocks along the last axis.
      plan: format and whether the record decides.
      multiplier: the layer's static decode multiplier (float32 scalar); ignored for formats without one and per token.
      per_token: whether each token has its own multiplier.
      guide: the rollout's record; a guided plan without one rounds to nearest.
      capture: whether to return codes and scales (block formats only, not for a guided site).
      channels: channels whose residual is rounded too and stands behind the values (block formats only, not for a guided site).

    Returns:
      The rounded values in the dtype of `x` (straight-through gradient), `[*rows, d]` or `[*rows, d + c]`, and the capture or None.

    Raises:
      ValueError: NVFP4 without a static or per-token multiplier.
    """
    if plan.format == "bf16":
        return keep_rounding(x), None
    if plan.format == "fp8":
        return _per_shard(site, fake_quant_fp8, x), None
    fmt = block_format(plan.format)
    scale = _multiplier_for(site, x, multiplier, per_token) if fmt.has_multiplier else None
    if plan.guided and guide is not None:
        return _guided(site, x, guide, fmt, scale), None
    quantized = quantize(x, fmt, scale) if capture else None
    if channels is not None:
        rounded = jnp.concatenate(residual_fake_quant(x, channels, fmt, scale), axis=-1)
    else:
        rounded = _nearest(site, x, fmt, scale) if quantized is None else dequantize(quantized, x.dtype)
    if quantized is None:
        return rounded, None
    token_scale = None
    if per_token and scale is not None:
        token_scale = scale[..., 0] if site in KV_SITES else scale
    return rounded, Captured(quantized.codes, quantized.scales, token_scale)


def parity_agreement(
    site: str,
    x: Float[Array, "*rows d"],
    rounded: Float[Array, "*rows d"],
    guide: Guide,
    plan: SitePlan,
    multiplier: Float[Array, ""] | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """How often rounding to nearest under the rollout's scale gives what the record asked for.

    Returns:
      Sum and count over the elements that have a record (float32 scalars).
    """
    fmt = block_format(plan.format)
    scales_only, scale = replace(guide, kind="scales", data=None), multiplier if fmt.has_multiplier else None
    own = _guided(site, x, scales_only, fmt, scale)
    valid = jnp.broadcast_to(guide.valid[..., None], x.shape)
    return jnp.sum((own == rounded) & valid, dtype=jnp.float32), jnp.sum(valid, dtype=jnp.float32)


def _multiplier_for(site: str, x: Float[Array, "*rows d"], multiplier: Float[Array, ""] | None, per_token: bool) -> Float[Array, "*#rows"]:
    if per_token:
        return token_multiplier(site, x, shared_axes=1 if site in KV_SITES else 0)
    if multiplier is None:
        raise ValueError(f"site {site} has no static multiplier: calibrate the policy first, or use activation_scale=per_token")
    return multiplier


def _nearest(site: str, x: Float[Array, "*rows d"], fmt: BlockFormat, scale: Array | None) -> Float[Array, "*rows d"]:
    return _per_shard(site, lambda x, scale: fake_quant(x, fmt, scale), x, scale)


def _guided(site: str, x: Float[Array, "*rows d"], guide: Guide, fmt: BlockFormat, scale: Array | None) -> Float[Array, "*rows d"]:
    return _per_shard(site, lambda x, guide, scale: guided_fake_quant(x, guide, fmt, scale), x, guide, scale)


def _per_shard(site: str, function: Callable[..., Float[Array, "*rows d"]], x: Float[Array, "*rows d"], *operands: Any) -> Any:
    """`function(x, *operands)` on each device's rows; what belongs to a row (record, multiplier) lies where the row does."""
    axes = (BATCH, None, "tensor", None) if site in KV_SITES else (BATCH, None, None)
    specs = jax.tree.map(lambda leaf: PartitionSpec(*axes[: leaf.ndim]), (x, *operands))
    return per_shard(function, specs, PartitionSpec(*axes))(x, *operands)
