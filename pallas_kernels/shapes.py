"""Shapes of real models, for the benchmark: (name, shape) with the contraction axis last."""

ACTIVATIONS = (
    ("qwen3-30b-a3b expert input, 8192 tokens", (8192, 2048)),
    ("qwen3-30b-a3b down input, 8192 x 8 rows", (65536, 768)),
    ("qwen3-235b-a22b expert input, 8192 tokens", (8192, 4096)),
    ("qwen3-30b-a3b keys of 16384 tokens", (16384, 4, 128)),
)
"""Expert inputs, down-projection inputs and keys of one micro-batch."""

WEIGHTS = (
    ("qwen3-30b-a3b gate weights of a layer", (128, 768, 2048)),
    ("qwen3-30b-a3b down weights of a layer", (128, 2048, 768)),
)
"""Stacked expert weights of one layer."""

SMALL = (
    ("toy expert input", (4096, 96)),
    ("toy weights", (8, 64, 96)),
)
"""For CPU and tests."""
