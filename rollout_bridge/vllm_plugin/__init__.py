"""What runs inside a vLLM worker: NumPy and torch, never jax."""
