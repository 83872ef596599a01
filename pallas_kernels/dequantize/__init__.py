"""FP4 codes and scales to a float tensor."""
