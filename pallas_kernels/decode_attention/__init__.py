"""Attention of one new token a sequence over a paged FP4 key/value cache."""
