"""One site of the guidance record: what the rollout's quantizer did to one activation of every layer.

A site is the vector entering the routed experts (`expert_input`, once per token), `k` (after RoPE) or `v`. Arrays are
token-major, so that the record is ragged like the trajectories it belongs to:

    data        uint8[N, Ls, *lead, bytes]   by kind: mantissa bits (ceil(d/8)), FP4 codes (ceil(d/2)), nothing (scales)
    scales      uint8[N, Ls, *lead, blocks]  E4M3 (NVFP4) or E8M0 (MXFP4) bytes, ceil(d/block)
    multiplier  float32[Ls] | float32[N, Ls] | None   static, per token, or absent (MXFP4)

`lead` is () for the expert input and (KV heads,) for K and V. Bits are packed least significant first, codes with the
even index in the low nibble. Method note, sections 5 and 6 (TRACE, arXiv 2610.07767).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from pallas_kernels import block_format
from trace_jax.quantization.plan import BLOCK_FORMATS

RecordKind: TypeAlias = Literal["scales", "mantissa", "codes"]
RECORD_KINDS: tuple[str, ...] = get_args(RecordKind)
BITS_PER_VALUE = {"scales": 0, "mantissa": 1, "codes": 4}
BLOCKS = {name: block_format(name).block for name in BLOCK_FORMATS}
Rows: TypeAlias = slice | np.ndarray


def row_bytes(kind: RecordKind, fmt: str, width: int) -> int:
    """Bytes of data and scales of one vector of a site."""
    return -(-width * BITS_PER_VALUE[kind] // 8) - (-width // BLOCKS[fmt])


def check(field: str, array: np.ndarray | None, dtype: type, shape: tuple[int, ...]) -> None:
    """Raise ValueError, naming the field, unless `array` has this dtype and shape."""
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{field}: expected a NumPy array, got {type(array).__name__}")
    if array.dtype != np.dtype(dtype):
        raise ValueError(f"{field}: dtype {array.dtype}, expected {np.dtype(dtype)}")
    if array.shape != shape:
        raise ValueError(f"{field}: shape {array.shape}, expected {shape}")


@dataclasses.dataclass(frozen=True, eq=False)
class SiteRecord:
    """One site's arrays for N tokens and Ls layers; see the module docstring.

    Attributes:
        format: block format of the rollout, "nvfp4" or "mxfp4".
        block: values per block scale.
        size: d, values of one vector (the contraction axis).
        layer_ids: global decoder layer ids, ascending.
        data: packed bits or codes; None for kind "scales".
        scales: block-scale bytes.
        multiplier: FP32 multiplier (amax/2688 convention), one a layer or one a token and layer; None for MXFP4.
        version: weight version of each row where it differs from the record's (K/V rewritten by a later pass).
    """

    format: str
    block: int
    size: int
    layer_ids: Int32[np.ndarray, " Ls"]
    data: UInt8[np.ndarray, "N Ls *lead bytes"] | None
    scales: UInt8[np.ndarray, "N Ls *lead blocks"]
    multiplier: Float32[np.ndarray, " Ls"] | Float32[np.ndarray, "N Ls"] | None = None
    version: Int32[np.ndarray, " N"] | None = None

    @property
    def num_tokens(self) -> int:
        """N."""
        return self.scales.shape[0]

    @property
    def lead(self) -> tuple[int, ...]:
        """Axes between the layer and the vector: () or (KV heads,)."""
        return self.scales.shape[2:-1]

    @property
    def per_token_multiplier(self) -> bool:
        """Whether the multiplier belongs to tokens rather than to the run."""
        return self.multiplier is not None and self.multiplier.ndim == 2

    def take(self, rows: Rows) -> SiteRecord:
        """The same site for some tokens: a view for a slice, a copy for an index array."""
        return dataclasses.replace(
            self,
            data=None if self.data is None else self.data[rows],
            scales=self.scales[rows],
            multiplier=self.multiplier[rows] if self.per_token_multiplier and self.multiplier is not None else self.multiplier,
            version=None if self.version is None else self.version[rows],
        )

    def take_layers(self, layer_ids: Sequence[int]) -> SiteRecord:
        """The same site for those of its layers that are in `layer_ids` (a view if they are adjacent)."""
        keep = np.flatnonzero(np.isin(self.layer_ids, np.asarray(list(layer_ids), np.int32)))
        adjacent = keep.size > 0 and keep[-1] - keep[0] + 1 == keep.size
        axis = slice(int(keep[0]), int(keep[-1]) + 1) if adjacent else keep
        return dataclasses.replace(
            self,
            layer_ids=self.layer_ids[axis],
            data=None if self.data is None else self.data[:, axis],
            scales=self.scales[:, axis],
            multiplier=None if self.multiplier is None else self.multiplier[..., axis],
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are present, by field name."""
        named = {name: getattr(self, name) for name in ("layer_ids", "data", "scales", "multiplier", "version")}
        return {name: array for name, array in named.items() if array is not None}

    def token_bytes(self) -> int:
        """Bytes of one token's row in data, scales and, where they are per token, multiplier and version."""
        layers = self.layer_ids.size
        vectors = layers * int(np.prod(self.lead, dtype=np.int64))
        data = 0 if self.data is None else vectors * self.data.shape[-1]
        multiplier = 4 * layers if self.per_token_multiplier else 0
        return data + vectors * self.scales.shape[-1] + multiplier + (0 if self.version is None else 4)

    def same_layout(self, other: SiteRecord) -> bool:
        """Whether rows of both can stand in one array."""
        return (
            (self.format, self.block, self.size, self.lead) == (other.format, other.block, other.size, other.lead)
            and np.array_equal(self.layer_ids, other.layer_ids)
            and (self.data is None) == (other.data is None)
            and (self.multiplier is None) == (other.multiplier is None)
        )

    def blank(self, num_tokens: int) -> SiteRecord:
        """The same layout with `num_tokens` zero rows, which the record marks invalid; a static multiplier stays."""
        multiplier = self.multiplier
        if self.per_token_multiplier:
            # Positive even where nothing was recorded: a zero multiplier is not a legal scale anywhere.
            multiplier = np.ones((num_tokens, self.layer_ids.size), np.float32)
        return dataclasses.replace(
            self,
            data=None if self.data is None else np.zeros((num_tokens, *self.data.shape[1:]), np.uint8),
            scales=np.zeros((num_tokens, *self.scales.shape[1:]), np.uint8),
            multiplier=multiplier,
            version=None if self.version is None else np.zeros(num_tokens, np.int32),
        )

    def validate(self, kind: RecordKind, num_tokens: int, where: str) -> None:
        """Raise ValueError, naming `where` and the field, if an array does not fit the contract."""
        if self.format not in BLOCKS or self.block != BLOCKS[self.format]:
            raise ValueError(f"{where}.format: {self.format!r} with block {self.block}; known formats and blocks: {BLOCKS}")
        num_layers = self.layer_ids.size
        check(f"{where}.layer_ids", self.layer_ids, np.int32, (num_layers,))
        if np.any(np.diff(self.layer_ids) <= 0) or np.any(self.layer_ids < 0):
            raise ValueError(f"{where}.layer_ids: {self.layer_ids.tolist()} must be ascending global layer ids")
        rows = (num_tokens, num_layers)
        check(f"{where}.scales", self.scales, np.uint8, (*rows, *self.lead, -(-self.size // self.block)))
        if kind == "scales":
            if self.data is not None:
                raise ValueError(f"{where}.data: must be None for a record of kind 'scales'")
        else:
            width = -(-self.size * BITS_PER_VALUE[kind] // 8)
            check(f"{where}.data", self.data, np.uint8, (*rows, *self.lead, width))
        if self.multiplier is not None:
            check(f"{where}.multiplier", self.multiplier, np.float32, rows if self.per_token_multiplier else (num_layers,))
            if not np.all(np.isfinite(self.multiplier) & (self.multiplier > 0)):
                raise ValueError(f"{where}.multiplier: every multiplier must be finite and positive")
        if (self.multiplier is None) != (self.format == "mxfp4"):
            raise ValueError(f"{where}.multiplier: nvfp4 needs one, mxfp4 has none")
        if self.version is not None:
            check(f"{where}.version", self.version, np.int32, (num_tokens,))


def concat_sites(parts: Sequence[SiteRecord], version_of_part: Sequence[np.ndarray], where: str) -> SiteRecord:
    """Rows of several parts of one site, in order.

    Static multipliers that differ between parts become one multiplier a token, so that no value changes.

    Args:
        parts: the same site of each part.
        version_of_part: the record's version rows of each part, for parts without a version of their own.
        where: name of the site, for the message.

    Raises:
        ValueError: the parts have different formats, layers or kinds.
    """
    first = parts[0]
    for part in parts[1:]:
        if not first.same_layout(part):
            raise ValueError(f"{where}: records of different layout cannot be joined (format, layers, kind or shape differ)")
    multiplier = first.multiplier
    if multiplier is not None:
        present = [(part.multiplier, part.num_tokens) for part in parts if part.multiplier is not None and part.num_tokens]
        multiplier = present[0][0] if present else multiplier
        if not all(other.ndim == 1 and np.array_equal(other, multiplier) for other, _ in present):
            multiplier = np.concatenate([np.broadcast_to(other, (count, first.layer_ids.size)) for other, count in present])
    version = None
    if any(part.version is not None for part in parts):
        rows = [default if part.version is None else part.version for part, default in zip(parts, version_of_part, strict=True)]
        version = np.concatenate(rows)
    return dataclasses.replace(
        first,
        data=None if first.data is None else np.concatenate([part.data for part in parts if part.data is not None]),
        scales=np.concatenate([part.scales for part in parts]),
        multiplier=multiplier,
        version=version,
    )
