"""Overlong reward shaping: an answer that comes near the token limit loses reward step by step."""

import numpy as np
from jaxtyping import Float32, Int64


def overlong_penalty(lengths: Int64[np.ndarray, " B"], *, max_length: int, buffer: int, factor: float = 1.0) -> Float32[np.ndarray, " B"]:
    """0 up to max_length - buffer tokens, then falling in a line to -factor at max_length.

    Source: DAPO (arXiv 2503.14476), equation 13 (soft overlong punishment).

    Args:
        lengths: sampled tokens of each answer.
        max_length: limit of an answer in tokens.
        buffer: 1 .. max_length, the last tokens, over which the penalty grows.
        factor: penalty of an answer at the limit, in units of reward.

    Returns:
        f32[B], to be added to the rewards.

    Raises:
        ValueError: the buffer is empty or longer than an answer.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong buffer {buffer} must lie within 1 and the longest answer {max_length}")
    beyond = lengths - (max_length - buffer)
    return (-factor * np.clip(beyond / buffer, 0.0, 1.0)).astype(np.float32)
