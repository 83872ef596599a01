"""The kernel compiled to machine code of a B200, which XLA can do without one if the CUDA plugin of jax is there (extra `cuda13`)."""

from __future__ import annotations

import importlib.util

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels import NVFP4
from tests.pallas_kernels.cases import FORMATS
from tests.pallas_kernels.test_block_scaled_matmul import lowered

B200 = """
gpu_device_info {
  cuda_compute_capability { major: 10 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA B200" device_vendor: "NVIDIA Corporation" device_address_bits: 64 device_memory_size: 191514411008
  core_count: 148 fpus_per_core: 128 clock_rate_ghz: 1.965 memory_bandwidth: 7672320000000 l2_cache_size: 132644864
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}
platform_name: "CUDA"
device_description_str: "NVIDIA B200"
"""
"""The properties of the chip that XLA asks for, in its own text format."""


@pytest.fixture
def no_cache():
    """A program from the compilation cache would not be compiled."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the CUDA plugin of jax: pip install '.[cuda13]'")
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 cannot compile for a GPU that it is only told about")
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_compiles_for_b200(fmt, monkeypatch, tmp_path, no_cache):
    for name, value in {"PTX": "1", "PTXAS": "1", "TO": str(tmp_path)}.items():
        monkeypatch.setenv(f"MOSAIC_GPU_DUMP_{name}", value)
    topology = topologies.get_topology_desc("1x1x1", "cuda", target_config=B200, topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    assert lowered(fmt, monkeypatch, in_shardings=sharding, out_shardings=sharding).compile()
    (ptx,), (assembler,) = (list(tmp_path.glob(f"*.{suffix}")) for suffix in ("ptx", "ptxas"))
    text = ptx.read_text()
    assert ".target sm_100a" in text
    # Four products a step; the compiler may write out the three steps.
    assert text.count(f"kind::mxf4nvf4.block_scale.scale_vec::{'4X' if fmt is NVFP4 else '2X'} ") in (4, 12)
    assert "for 'sm_100a'" in assembler.read_text() and "0 bytes spill stores, 0 bytes spill loads" in assembler.read_text()
