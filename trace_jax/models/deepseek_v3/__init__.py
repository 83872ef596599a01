"""The DeepSeek-V3 family."""
