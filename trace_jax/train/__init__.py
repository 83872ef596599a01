"""Training: batches, the optimizer step, the RL and SFT loops, checkpoints."""
