"""Settings of every test: CPU unless asked otherwise, strict promotion, checked annotations, a compilation cache, no silent skips.

Environment:
  TRACE_JAX_TEST_GPU=1        run on the GPU, tests marked `gpu` included
  TRACE_JAX_REQUIRE_EXTRAS=1  a missing optional package is a failure instead of a skip
  CI=true                     hypothesis makes the same examples every time
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType
from typing import Any

ON_GPU = os.environ.get("TRACE_JAX_TEST_GPU") == "1"
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

REQUIRE_EXTRAS = os.environ.get("TRACE_JAX_REQUIRE_EXTRAS") == "1"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / f"jax-{jax.__version__}"

# The annotations of these packages are checked at every call, before any test can import them; an int may stand for a float.
# Not through jaxtyping's pytest option, which cannot pass a setting to the checker when it names two packages.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook(["pallas_kernels", "trace_jax"], CHECKER)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(CACHE)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
# A size limit also turns on the cache's file lock, which parallel workers need.
jax.config.update("jax_compilation_cache_max_size", 2 * 1024**3)

hypothesis.settings.register_profile("default", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def key() -> jax.Array:
    """A PRNG key, the same in every test."""
    return jax.random.key(2610)


@pytest.fixture
def unchecked() -> Generator[None, None, None]:
    """Switches the run-time checks of annotations off: the test passes wrong arrays and sees what a user sees."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def require() -> Callable[[str], ModuleType]:
    """`require("torch")` imports an optional package, or skips the test and names it."""

    def load(package: str) -> ModuleType:
        try:
            return importlib.import_module(package)
        except ImportError as error:
            pytest.skip(f"could not import {package!r}: {error}")

    return load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run only on request."""
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; set TRACE_JAX_TEST_GPU=1"))


def _fail_if_package_missing(report: Any) -> None:
    """Turns a skip for a missing package (`importorskip`, `require`) into a failure when extras are required."""
    if REQUIRE_EXTRAS and report.skipped and "could not import" in str(report.longrepr):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{reason}\nTRACE_JAX_REQUIRE_EXTRAS=1 forbids skipping for a missing package; run: make parity"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    report = yield
    _fail_if_package_missing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    report = yield
    _fail_if_package_missing(report)
    return report
