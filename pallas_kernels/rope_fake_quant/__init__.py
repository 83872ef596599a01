"""Rotate by position (RoPE) and round to FP4, in one pass over memory."""
