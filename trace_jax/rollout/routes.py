"""Expert routes of the rollout, for routing replay (R3, arXiv 2510.11370).

Row i holds the experts that token i took as an input of the model; the last token of a sequence was never an input and
has none. Layers are named by global decoder layer id, so a model whose first layers are dense loses nothing. There is no
in-band sentinel in the stored form; inside jit, -1 means "choose freely".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32, UInt8, UInt16

from trace_jax.guidance.site_record import Rows, check

FREE = -1


def route_dtype(num_experts: int) -> type[np.uint8] | type[np.uint16]:
    """Smallest unsigned type that holds the ids of `num_experts` experts."""
    if not 0 < num_experts <= 65536:
        raise ValueError(f"num_experts: {num_experts} is outside 1..65536")
    return np.uint8 if num_experts <= 256 else np.uint16


@dataclasses.dataclass(frozen=True, eq=False)
class Routes:
    """Routes of N tokens.

    Attributes:
        routed_experts: expert ids, uint8 up to 256 experts, else uint16.
        routes_valid: rows that hold routes; the others route freely and are counted.
        moe_layer_ids: global decoder layer id of each of the Lm routed layers, ascending.
    """

    routed_experts: UInt8[np.ndarray, "N Lm k"] | UInt16[np.ndarray, "N Lm k"]
    routes_valid: Bool[np.ndarray, " N"]
    moe_layer_ids: Int32[np.ndarray, " Lm"]

    def take(self, rows: Rows) -> Routes:
        """Rows of the routes: views for a slice, copies for an index array."""
        return dataclasses.replace(self, routed_experts=self.routed_experts[rows], routes_valid=self.routes_valid[rows])

    def blank(self, num_tokens: int) -> Routes:
        """`num_tokens` rows of the same layout without a route."""
        ids = np.zeros((num_tokens, *self.routed_experts.shape[1:]), self.routed_experts.dtype)
        return dataclasses.replace(self, routed_experts=ids, routes_valid=np.zeros(num_tokens, bool))

    @staticmethod
    def concat(parts: Sequence[Routes | None], num_tokens: Sequence[int]) -> Routes | None:
        """Rows of several parts in order; a part without routes becomes missing rows, never expert 0.

        Raises:
            ValueError: layers, experts per token or dtypes differ.
        """
        present = [part for part in parts if part is not None]
        if not present:
            return None
        first = present[0]
        for part in present[1:]:
            if not np.array_equal(part.moe_layer_ids, first.moe_layer_ids):
                raise ValueError(f"moe_layer_ids: {part.moe_layer_ids.tolist()} cannot be joined with {first.moe_layer_ids.tolist()}")
            if (part.routed_experts.dtype, part.routed_experts.shape[1:]) != (first.routed_experts.dtype, first.routed_experts.shape[1:]):
                raise ValueError("routed_experts: parts differ in dtype or experts per token")
        full = [first.blank(count) if part is None else part for part, count in zip(parts, num_tokens, strict=True)]
        ids = np.concatenate([part.routed_experts for part in full])
        return Routes(ids, np.concatenate([part.routes_valid for part in full]), first.moe_layer_ids)

    def validate(self, num_tokens: int) -> None:
        """Raise ValueError, naming the field, unless the routes fit `num_tokens` tokens.

        A capture that is shorter or longer than the tokens is refused: it belongs to other tokens or was cut.
        """
        if self.routed_experts.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"routed_experts: dtype {self.routed_experts.dtype}, expected uint8 or uint16")
        width = self.routed_experts.shape[-1]
        check("routed_experts", self.routed_experts, self.routed_experts.dtype.type, (num_tokens, self.moe_layer_ids.size, width))
        check("routes_valid", self.routes_valid, np.bool_, (num_tokens,))
        check("moe_layer_ids", self.moe_layer_ids, np.int32, (self.moe_layer_ids.size,))
        if np.any(np.diff(self.moe_layer_ids) <= 0) or np.any(self.moe_layer_ids < 0):
            raise ValueError(f"moe_layer_ids: {self.moe_layer_ids.tolist()} must be ascending global layer ids")
