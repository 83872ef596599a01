"""New keys and values into a paged FP4 cache."""
