"""The gpt-oss family."""
