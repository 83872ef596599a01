"""The Qwen3.5-MoE family."""
