"""The table of program sizes: its values, who reads it, that they compile, and the command that writes it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NVFP4, empty_paged_kv, groups, prepare_w4, quantize, tilings, tune
from pallas_kernels.decode_attention import pallas as attention
from pallas_kernels.grouped_matmul import pallas as grouped
from pallas_kernels.grouped_matmul_w4 import pallas as grouped_w4
from tests.pallas_kernels.test_lowering import lowered

ENTRIES = [(device, kernel) for device, kernels in tilings.table().items() for kernel in kernels]
PRODUCTS = ("forward", "grad_x", "grad_weights")


@pytest.fixture
def small_problem(monkeypatch):
    """Quantizers whose arrays nobody needs, on what passes for a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(tune.KERNELS, "quantizers", dataclasses.replace(tune.KERNELS["quantizers"], problem=lambda: ()))


GROUPED = {"rows": 128, "columns": 256, "step": 64, "num_warps": 8, "num_stages": 3}
H200 = {f"grouped_matmul/{product}": GROUPED for product in PRODUCTS} | {
    "decode_attention": {"tokens": 64, "code_bytes": 4096, "num_warps": 1, "num_stages": 3, "programs": 1584},
    "grouped_matmul_w4/few_rows": {"features": 64, "num_stages": 2, "programs": 528},
    "grouped_matmul_w4/many_rows": {"features": 128, "num_stages": 3, "programs": 528},
    "quantizers": {"tile": 128},
    "residual_fake_quant": {"tile": 256, "num_warps": 4},
}
"""The sizes before there was a table, and of kernels that came later."""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table that a test may write to, with sizes for one device."""
    path = tmp_path / "tilings.json"
    path.write_text(tilings.text({tilings.DEFAULT: H200}))
    monkeypatch.setattr(tilings, "PATH", path)
    tilings.table.cache_clear()
    yield path
    tilings.table.cache_clear()


def weights(experts: int = 4, features: int = 384):
    shape = jax.ShapeDtypeStruct((experts, features, 512), jnp.bfloat16)
    return jax.eval_shape(lambda w: prepare_w4(quantize(w, NVFP4)), shape)


def cache(head_dim: int):
    make = lambda: empty_paged_kv(8, 128, 2, head_dim, np.zeros((2, 4), int), NVFP4, 1.0, 1.0)  # noqa: E731
    return jax.eval_shape(make)


@pytest.mark.usefixtures("table")
def test_sizes_of_the_h200_serve_a_device_that_is_not_in_the_table():
    """They make the tilings that the kernels had before there was a table."""
    assert groups.plan((1000, 64), NVFP4, False) == groups.Groups((1000,), 64, NVFP4, False, 128)
    assert [grouped.choose(product) for product in PRODUCTS] == [grouped.Tiling(128, 256, 64, 8, 3)] * 3
    w4 = functools.partial(grouped_w4.choose_tiling, interpret=False)
    assert w4(64, weights()) == grouped_w4.Tiling(64, 16, 4, 2, 2)
    assert w4(100, weights()) == grouped_w4.Tiling(128, 32, 4, 3, 2)
    assert w4(300, weights(features=192)) == grouped_w4.Tiling(64, 64, 4, 3, 2)
    assert w4(8192, weights(experts=128)).splits == 1
    assert attention.choose(cache(128), False) == attention.Schedule(8, 64, 1, 3)
    assert attention.choose(cache(256), False) == attention.Schedule(16, 32, 1, 3)
    for kernel, sizes in H200.items():
        assert tilings.lookup(kernel, "NVIDIA T4") == tilings.lookup(kernel) == tilings.lookup(kernel, "NVIDIA H200") == sizes


@pytest.mark.usefixtures("table")
def test_the_kernels_read_the_table_of_their_device():
    device = jax.devices()[0].device_kind
    tilings.write(device, "quantizers", {"tile": 256})
    tilings.write(device, "grouped_matmul/grad_x", {"rows": 64, "columns": 128, "step": 32, "num_warps": 4, "num_stages": 2})
    tilings.write(device, "grouped_matmul_w4/few_rows", {"features": 128, "num_stages": 4, "programs": 1})
    tilings.write(device, "decode_attention", {"tokens": 32, "code_bytes": 4096, "num_warps": 2, "num_stages": 4, "programs": 8})
    plan = groups.plan((1000, 64), NVFP4, False)
    assert (plan.tile, plan.num_warps) == (256, 8)
    assert grouped.choose("grad_x") == grouped.Tiling(64, 128, 32, 4, 2)
    assert grouped.choose("forward") == grouped.Tiling(128, 256, 64, 8, 3)  # no entry of its own
    assert grouped_w4.choose_tiling(64, weights(), False) == grouped_w4.Tiling(128, 16, 4, 4, 1)
    assert attention.choose(cache(128), False) == attention.Schedule(2, 32, 2, 4)


def test_the_file_is_as_the_command_writes_it():
    assert tilings.PATH.read_text() == tilings.text(tilings.table())
    assert set(tune.KERNELS) == set(tilings.table()[tilings.DEFAULT])


@pytest.mark.parametrize(("device", "kernel"), ENTRIES)
def test_every_entry_lowers_for_cuda(device, kernel):
    """At the shapes of a real model, which it therefore divides."""
    tunable, sizes = tune.KERNELS[kernel], tilings.lookup(kernel, device)
    assert sizes in tunable.candidates
    arguments = jax.eval_shape(tunable.problem)
    assert "triton" in lowered(lambda *arrays: tunable.run(sizes, *arrays), *arguments)


@pytest.mark.parametrize("kernel", tune.KERNELS)
def test_no_candidate_serves_fewer_shapes(kernel):
    """Axes must be whole numbers of the grouped products' tiles."""
    for sizes in tune.KERNELS[kernel].candidates:
        assert set(sizes) == set(H200[kernel])
        if kernel.startswith("grouped_matmul/"):
            assert all(GROUPED[axis] % sizes[axis] == 0 for axis in ("rows", "columns", "step"))
        powers = [sizes[name] for name in ("tile", "rows", "columns", "step", "features", "tokens", "num_warps") if name in sizes]
        assert all(size & (size - 1) == 0 for size in powers)


def clock(fast: dict[str, int], fast_us: float):
    """A clock for which one candidate differs from the rest, and one does not compile."""
    seen = []

    def time_us(function, arguments):
        (sizes,) = function.args
        seen.append(sizes)
        if sizes == {"tile": 512}:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory")
        return fast_us if sizes == fast else 100.0

    return time_us, seen


@pytest.mark.usefixtures("table", "small_problem")
@pytest.mark.parametrize(("fast_us", "written"), ((97.0, {"tile": 256}), (99.0, {"tile": 128})))
def test_the_fastest_is_written_unless_it_is_noise(fast_us, written, capsys):
    time_us, seen = clock({"tile": 256}, fast_us)
    assert tune.main(["quantizers"], time_us) == 0
    assert len(seen) == len(tune.KERNELS["quantizers"].candidates) and {"tile": 512} in seen
    assert tilings.lookup("quantizers", jax.devices()[0].device_kind) == written
    assert {kernel: tilings.lookup(kernel) for kernel in H200} == H200 | {"quantizers": written}
    assert f"quantizers: {written}" in capsys.readouterr().out


def test_nothing_that_compiles_leaves_the_table_as_it_is(table, small_problem, capsys):
    def time_us(function, arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: shared memory")

    before = table.read_text()
    assert tune.main(["quantizers"], time_us) == 0
    assert table.read_text() == before and "no candidate compiles" in capsys.readouterr().err


def test_a_machine_without_a_gpu_is_refused_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert tune.main([]) == 2
    assert capsys.readouterr() == ("", "tuning times compiled kernels and jax sees no GPU here; tilings.json stays as it is\n")


def test_an_unknown_kernel_is_refused_with_the_names(capsys):
    assert tune.main(["matmul"]) == 2
    assert capsys.readouterr().err.startswith("unknown kernel matmul; write one of quantizers, ")
