"""The rollout's guidance record. `GuidanceCache`, its store keyed by sample, is in `trace_jax.guidance.cache`."""

from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import RECORD_KINDS, RecordKind, SiteRecord

__all__ = ["RECORD_KINDS", "GuidanceRecord", "RecordKind", "SiteRecord"]
