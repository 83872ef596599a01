"""Normalise by the root mean square and round to FP4, in one pass over memory."""
