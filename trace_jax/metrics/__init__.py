"""Metrics: sums and counts on the device, JSON lines and loggers on the host. Every name is listed in docs/metrics.md."""

from trace_jax.metrics.jsonl import JsonlWriter, read_metrics
from trace_jax.metrics.weighted import MaxMetric, Stats, WeightedMetric, combine, finalize
from trace_jax.metrics.writers import MetricsLog, open_writers

__all__ = [
    "JsonlWriter",
    "MaxMetric",
    "MetricsLog",
    "Stats",
    "WeightedMetric",
    "combine",
    "finalize",
    "open_writers",
    "read_metrics",
]
