"""Products of FP4 rows with FP4 weights on the tensor cores of Blackwell: lowered and compiled, never run (docs/blackwell.md)."""
