"""Products of sorted rows with the weight matrix of their group, and their gradients."""
