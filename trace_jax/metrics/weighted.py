"""Metrics as sums and counts, so that no split of a batch into micro-batches or shards changes their value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from pallas_kernels.pytrees import register_arrays


@register_arrays
@dataclass(frozen=True)
class WeightedMetric:
    """A mean that is not divided yet: a sum of values and how many values it holds.

    Both fields have the same shape: scalars for a metric, ``[P]`` for a metric per position. The count is an integer, so
    it stays exact where a float32 count would stop at 2**24 tokens. A pytree, so it can leave a jitted function.
    """

    sum: Float[Any, "*positions"] | float
    count: Integer[Any, "*positions"] | int

    def merge(self, other: "WeightedMetric") -> "WeightedMetric":
        """The metric over both parts; works under jit (for accumulating inside a scan) and on the host."""
        return WeightedMetric(self.sum + other.sum, self.count + other.count)

    def mean(self) -> Float[np.ndarray, "*positions"]:
        """sum / count in float64 on the host; NaN where nothing was counted."""
        total, count = np.asarray(self.sum, np.float64), np.asarray(self.count, np.float64)
        return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


@register_arrays
@dataclass(frozen=True)
class MaxMetric:
    """A maximum over values that are never negative; 0 when there was none."""

    maximum: Float[Any, ""] | float

    def merge(self, other: "MaxMetric") -> "MaxMetric":
        """The larger of both; works under jit and on the host. NaN wins, so that it cannot hide."""
        return MaxMetric(jnp.maximum(self.maximum, other.maximum))


Stats: TypeAlias = dict[str, WeightedMetric | MaxMetric]


def combine(parts: Iterable[Mapping[str, WeightedMetric | MaxMetric]]) -> Stats:
    """Combines the statistics of micro-batches or shards on the host.

    Sums are added in float64 and counts as integers, so the order and the number of parts do not matter beyond the
    rounding inside each part. A name that only some parts have is combined over those parts.

    Args:
        parts: statistics of disjoint parts of one batch. A sequence must lie in one part whole.

    Returns:
        The statistics of the whole, with NumPy values.

    Raises:
        ValueError: if one name stands for a mean in one part and a maximum in another.
    """
    combined: Stats = {}
    for part in parts:
        for name, metric in part.items():
            host = _to_host(metric)
            known = combined.get(name)
            if known is None:
                combined[name] = host
            elif isinstance(known, WeightedMetric) and isinstance(host, WeightedMetric):
                combined[name] = WeightedMetric(np.asarray(known.sum + host.sum), np.asarray(known.count + host.count))
            elif isinstance(known, MaxMetric) and isinstance(host, MaxMetric):
                combined[name] = MaxMetric(np.asarray(np.maximum(np.asarray(known.maximum), np.asarray(host.maximum))))
            else:
                raise ValueError(f"metric {name!r} is a mean in one part and a maximum in another; use two names")
    return combined


def finalize(stats: Mapping[str, WeightedMetric | MaxMetric], prefix: str = "") -> dict[str, float]:
    """Divides: the scalar value of every statistic, under ``prefix + name``. A mean over nothing is NaN."""
    values: dict[str, float] = {}
    for name, metric in stats.items():
        value = metric.mean() if isinstance(metric, WeightedMetric) else np.asarray(metric.maximum, np.float64)
        values[prefix + name] = float(value)
    return values


def _to_host(metric: WeightedMetric | MaxMetric) -> WeightedMetric | MaxMetric:
    if isinstance(metric, WeightedMetric):
        return WeightedMetric(np.asarray(metric.sum, np.float64), np.asarray(metric.count, np.int64))
    return MaxMetric(np.asarray(metric.maximum, np.float64))
