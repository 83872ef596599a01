"""The guidance record of a batch of tokens: every site, the rows that have one, and the weights they were made with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from trace_jax.guidance.compact import code_low_bits
from trace_jax.guidance.site_record import RECORD_KINDS, RecordKind, Rows, SiteRecord, check, concat_sites

# A record can only lose information.
_REACHABLE = {"codes": ("codes", "mantissa", "scales"), "mantissa": ("mantissa", "scales"), "scales": ("scales",)}


@dataclasses.dataclass(frozen=True, eq=False)
class GuidanceRecord:
    """The record of N tokens, row-aligned with the `tokens` of the trajectories that carry it.

    Attributes:
        kind: "scales", "mantissa" (one bit a value) or "codes" (four bits a value, full record).
        sites: site name -> arrays.
        valid: rows that hold a record; the trainer rounds the others to nearest under its own scale and counts them.
        version: weight version the row was computed with.
        recomputed: rows written again after preemption or re-prefill (expert input keeps the first write, K/V the last).
    """

    kind: RecordKind
    sites: Mapping[str, SiteRecord]
    valid: Bool[np.ndarray, " N"]
    version: Int32[np.ndarray, " N"]
    recomputed: Bool[np.ndarray, " N"] | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.valid.shape[0]

    def take(self, rows: Rows) -> GuidanceRecord:
        """Rows of the record: views for a slice, copies for an index array."""
        return dataclasses.replace(
            self,
            sites={name: site.take(rows) for name, site in self.sites.items()},
            valid=self.valid[rows],
            version=self.version[rows],
            recomputed=None if self.recomputed is None else self.recomputed[rows],
        )

    def take_layers(self, layer_ids: Sequence[int]) -> GuidanceRecord:
        """Only these global layers; a site left without a layer is dropped."""
        sites = {name: site.take_layers(layer_ids) for name, site in self.sites.items()}
        return dataclasses.replace(self, sites={name: site for name, site in sites.items() if site.layer_ids.size})

    def to_compact(self, kind: RecordKind, layer_ids: Sequence[int] | None = None) -> GuidanceRecord:
        """A smaller record of the same tokens: fewer bits, fewer layers.

        Args:
            kind: what to keep; at most as much as this record has.
            layer_ids: global layers to keep; None keeps all.

        Raises:
            ValueError: `kind` needs information that this record does not hold.
        """
        if kind not in _REACHABLE[self.kind]:
            raise ValueError(f"a {self.kind!r} record cannot become {kind!r}; reachable kinds: {', '.join(_REACHABLE[self.kind])}")
        record = self if layer_ids is None else self.take_layers(layer_ids)
        if kind == self.kind:
            return record
        sites = {}
        for name, site in record.sites.items():
            data = None if kind == "scales" or site.data is None else code_low_bits(site.data, site.size)
            sites[name] = dataclasses.replace(site, data=data)
        return dataclasses.replace(record, kind=kind, sites=sites)

    def bytes_per_token(self) -> dict[str, float]:
        """Exact size of the record, per token.

        Returns:
            One entry per site (its per-token arrays: the formulas of the method note, section 5), `rows` (validity,
            version and flags of the token), `constants` (layer ids and static multipliers, shared by all N tokens),
            and `total`, which is every byte of every array divided by N. The dict of no tokens leaves constants at 0.
        """
        sizes = {name: float(site.token_bytes()) for name, site in self.sites.items()}
        sizes["rows"] = 5.0 + (0.0 if self.recomputed is None else 1.0)
        shared = sum(
            site.layer_ids.nbytes + (0 if site.multiplier is None or site.per_token_multiplier else site.multiplier.nbytes)
            for site in self.sites.values()
        )
        sizes["constants"] = shared / self.num_tokens if self.num_tokens else 0.0
        return sizes | {"total": sum(sizes.values())}

    def arrays(self) -> dict[str, np.ndarray]:
        """Every array of the record by a dotted name."""
        named = {"valid": self.valid, "version": self.version}
        if self.recomputed is not None:
            named["recomputed"] = self.recomputed
        for name, site in self.sites.items():
            named.update({f"sites.{name}.{field}": array for field, array in site.arrays().items()})
        return named

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays().values())

    def blank(self, num_tokens: int) -> GuidanceRecord:
        """The same layout for `num_tokens` tokens without a record."""
        return dataclasses.replace(
            self,
            sites={name: site.blank(num_tokens) for name, site in self.sites.items()},
            valid=np.zeros(num_tokens, bool),
            version=np.zeros(num_tokens, np.int32),
            recomputed=None if self.recomputed is None else np.zeros(num_tokens, bool),
        )

    @staticmethod
    def concat(parts: Sequence[GuidanceRecord | None], num_tokens: Sequence[int]) -> GuidanceRecord | None:
        """Rows of several records in order; a part without a record becomes invalid rows.

        Args:
            parts: records, or None where the engine gave none.
            num_tokens: tokens of each part.

        Returns:
            The joined record, None if no part has one.

        Raises:
            ValueError: kinds, sites or layouts differ.
        """
        present = [part for part in parts if part is not None]
        if not present:
            return None
        first = present[0]
        for part in present[1:]:
            if part.kind != first.kind or list(part.sites) != list(first.sites):
                raise ValueError(
                    f"guidance: a {first.kind!r} record of sites {list(first.sites)} cannot be joined with a "
                    f"{part.kind!r} record of sites {list(part.sites)}; bring both to one form with to_compact"
                )
        full = [first.blank(count) if part is None else part for part, count in zip(parts, num_tokens, strict=True)]
        recomputed = None
        if any(part.recomputed is not None for part in full):
            recomputed = np.concatenate([np.zeros(p.num_tokens, bool) if p.recomputed is None else p.recomputed for p in full])
        versions = [part.version for part in full]
        sites = {name: concat_sites([part.sites[name] for part in full], versions, f"guidance.{name}") for name in first.sites}
        return GuidanceRecord(first.kind, sites, np.concatenate([p.valid for p in full]), np.concatenate(versions), recomputed)

    def validate(self, num_tokens: int) -> None:
        """Check every array against the contract.

        Args:
            num_tokens: rows the record must have.

        Raises:
            ValueError: the message starts with the name of the field.
        """
        if self.kind not in RECORD_KINDS:
            raise ValueError(f"guidance.kind: {self.kind!r}; expected one of {RECORD_KINDS}")
        check("guidance.valid", self.valid, np.bool_, (num_tokens,))
        check("guidance.version", self.version, np.int32, (num_tokens,))
        if self.recomputed is not None:
            check("guidance.recomputed", self.recomputed, np.bool_, (num_tokens,))
        for name, site in self.sites.items():
            site.validate(self.kind, num_tokens, f"guidance.{name}")
