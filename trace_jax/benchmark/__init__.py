"""Benchmarks above the kernels, and the table that documents a benchmark's result file."""
