"""The GLM-4.5 family."""
