"""Measuring a policy: pass rate at a rollout precision, and the divergence between trainer and rollout."""
