"""Times of the kernels on this machine, against limits measured in the same run and against the best peer at hand.

1. `cases` says what a measurement is; `elementwise`, `fused`, `products` and `attention` list those of their ops, at real `shapes`.
2. `timing` takes the median time of a call, `limits` the machine's copy bandwidth and product rate.
3. `peers` are the implementations of others; `targets` what a kernel should reach; `rows` puts a measurement into the agreed columns.
4. `runner` does it for the ops that are asked for.
"""

from pallas_kernels.benchmark.runner import OPS, run

__all__ = ["OPS", "run"]
