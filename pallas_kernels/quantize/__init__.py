"""Float tensor to FP4 codes and scales."""
