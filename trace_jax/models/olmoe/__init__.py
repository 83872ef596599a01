"""The OLMoE family."""
