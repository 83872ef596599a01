"""What the machine can do, measured and not taken from a data sheet."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.benchmark.cases import Setting
from pallas_kernels.benchmark.timing import Call, Timer

_MATMUL_SIZE = 8192


class Limits(NamedTuple):
    """Limits of a device.

    Args:
      bandwidth: bytes a second, read and written, of a copy.
      matmul_rate: floating-point operations a second of a large bfloat16 product; None where it was not measured.
    """

    bandwidth: float
    matmul_rate: float | None = None

    def share(self, moved: int, flops: int | None, time_us: float) -> float:
        """The least time that the limits allow, as a share of the time taken."""
        seconds = moved / self.bandwidth
        if flops is not None and self.matmul_rate is not None:
            seconds = max(seconds, flops / self.matmul_rate)
        return seconds / (time_us * 1e-6)


_LARGE = {True: 1 << 24, False: 1 << 28}
"""Bytes that the copy moves whose bandwidth counts for products, toy or not."""


def measure_limits(setting: Setting, timer: Timer, products: bool) -> Limits:
    """The limits of this device; the product's rate on a GPU, and only if it is asked for.

    The product's operands are random: constant ones draw less power, and the clock then stays higher than in any real product.
    """
    bandwidth = copy_bandwidth(setting, timer, _LARGE[setting.small])
    if not products or not setting.on_gpu:
        return Limits(bandwidth)
    left, right = (jax.random.normal(key, (_MATMUL_SIZE, _MATMUL_SIZE), jnp.bfloat16) for key in jax.random.split(jax.random.key(0)))
    return Limits(bandwidth, 2 * _MATMUL_SIZE**3 / (timer.time_us(Call(jnp.matmul, (left, right))) * 1e-6))


def copy_bandwidth(setting: Setting, timer: Timer, moved: int) -> float:
    """Bytes a second of a copy that reads and writes `moved` bytes in all; small ones take longer for a byte."""
    x = jnp.zeros((max(moved // 4, 1),), jnp.bfloat16)
    # XLA on CPU hands a copy its input without moving a byte.
    operation = jnp.copy if setting.on_gpu else jnp.negative
    return 2 * x.nbytes / (timer.time_us(Call(operation, (x,))) * 1e-6)
