"""Matrix products with FP4 weights, which are read as codes and scales."""
