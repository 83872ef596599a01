"""Shapes of real models, for the benchmark, and toy ones for CPU and tests."""

from typing import NamedTuple

ACTIVATIONS = (
    ("square", (8192, 8192)),
    ("qwen3-30b-a3b expert input, 8192 tokens", (8192, 2048)),
    ("qwen3-30b-a3b down input, 8192 x 8 rows", (65536, 768)),
    ("qwen3-235b-a22b expert input, 8192 tokens", (8192, 4096)),
    ("qwen3-30b-a3b keys of 16384 tokens", (16384, 4, 128)),
)
"""A large square, and expert inputs, down-projection inputs and keys of one micro-batch: (name, shape) with the contraction axis last."""

KEYS = (ACTIVATIONS[-1], ("qwen3-30b-a3b keys of 131072 tokens", (131072, 4, 128)))
"""Keys: (name, shape) with axes for token, head and value."""

WEIGHTS = (
    ("qwen3-30b-a3b gate weights of a layer", (128, 768, 2048)),
    ("qwen3-30b-a3b down weights of a layer", (128, 2048, 768)),
)
"""Stacked expert weights of one layer, in the same form."""

SMALL = (("toy expert input", (4096, 96)),)
"""A toy shape of that form."""


class ProductShape(NamedTuple):
    """Rows [rows, size] meet weights [groups, features, size], each row those of its group."""

    name: str
    rows: int
    groups: int
    features: int
    size: int


class AttentionShape(NamedTuple):
    """One query token of each sequence meets the tokens of a cache."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


GROUPED = (ProductShape("qwen3-30b-a3b gate, 8192 x 8 rows", 65536, 128, 768, 2048),)
"""The experts of a training micro-batch."""

GROUPED_W4 = tuple(ProductShape("qwen3-30b-a3b gate", rows, 128, 768, 2048) for rows in (16, 64, 128, 512, 2048, 4096))
"""The experts of a decoding step, from 2 to 512 sequences."""

SINGLE_W4 = tuple(ProductShape("qwen3-235b-a22b query projection", rows, 1, 8192, 4096) for rows in (16, 512))
"""One matrix for all rows."""

DECODE = tuple(AttentionShape(16, 8192, 32, 8, head_dim) for head_dim in (128, 64, 256))
"""Decoding with long answers."""

SMALL_GROUPED = (ProductShape("toy experts", 96, 3, 256, 256),)
SMALL_GROUPED_W4 = (ProductShape("toy experts", 24, 2, 64, 256),)
SMALL_SINGLE_W4 = (ProductShape("toy projection", 16, 1, 64, 256),)
SMALL_DECODE = (AttentionShape(2, 64, 4, 2, 64),)
