"""RL fine-tuning of Mixture-of-Experts language models with rollout-guided FP4 quantization in JAX."""

__version__ = "0.1.0"
