"""The kernels are compiled as users compile them: what an optimizing compiler does to roundings is what these tests are about."""

from collections.abc import Generator

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def optimized() -> Generator[None, None, None]:
    """Compiles with all optimizations, and forgets what was compiled without."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", before)
