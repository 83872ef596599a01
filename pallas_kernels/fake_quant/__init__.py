"""Round a float tensor to its FP4 values, with a straight-through gradient."""
