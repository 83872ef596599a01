"""The Dense Qwen3 family."""
