"""Qwen3-MoE: grouped-query attention with per-head RMS norm, and a mixture of experts in every layer."""
