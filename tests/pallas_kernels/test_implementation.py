"""Which implementation runs, and what the Triton one says where it cannot."""

from __future__ import annotations

import sys
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import NVFP4, Quantized, dequantize, fake_quant, triton_call
from pallas_kernels.implementation import dispatch

X = jnp.ones((2, 48))


def chosen(implementation: str | None, **more) -> str:
    return dispatch("op", implementation, reference=lambda: "reference", pallas=lambda: "pallas", **more)


def test_a_name_is_used_or_refused():
    assert [chosen(name, triton=lambda: "triton") for name in ("reference", "pallas", "triton")] == ["reference", "pallas", "triton"]
    assert chosen(None, triton=lambda: "triton") == "reference"
    with pytest.raises(NotImplementedError, match="^op has no triton implementation; write reference, pallas or None$"):
        chosen("triton")
    with pytest.raises(ValueError, match="'cuda'; write one of reference, pallas, triton or None"):
        chosen("cuda")


def test_none_takes_pallas_on_a_gpu_and_the_reference_where_pallas_cannot_serve(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def refused():
        raise NotImplementedError

    assert chosen(None, triton=lambda: "triton") == "pallas"
    assert dispatch("op", None, reference=lambda: "reference", pallas=refused) == "reference"


def test_triton_without_a_gpu(monkeypatch):
    monkeypatch.setattr(triton_call, "_kernel", lambda op: op)
    with pytest.raises(NotImplementedError, match="run on NVIDIA GPUs, not on cpu"):
        fake_quant(X, NVFP4, implementation="triton")


def test_triton_without_its_packages(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pallas_kernels.triton_kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(NotImplementedError, match=r"need triton; run: pip install 'trace-jax\[triton\]'"):
        fake_quant(X, NVFP4, implementation="triton")
    monkeypatch.setattr(triton_call, "_kernel", lambda op: op)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match=r"need jax-triton; run: pip install 'trace-jax\[triton\]'"):
        fake_quant(X, NVFP4, implementation="triton")


def test_triton_names_what_it_cannot_serve(monkeypatch):
    with pytest.raises(NotImplementedError, match="at least one row"):
        fake_quant(jnp.zeros((0, 32)), NVFP4, implementation="triton")
    q = Quantized(jnp.zeros((2, 8), jnp.uint8), jnp.zeros((2, 1), jnp.uint8), jnp.float32(1), 16, NVFP4)
    with pytest.raises(NotImplementedError, match="no float8_e4m3fn; take bfloat16"):
        dequantize(q, jnp.float8_e4m3fn, implementation="triton")
    monkeypatch.setattr(triton_call, "_MOST_GROUPS", 5)
    with pytest.raises(NotImplementedError, match=r"at most 5 blocks, got shape \(2, 48\)"):
        fake_quant(X, NVFP4, implementation="triton")


def call_of_0_3(*arguments, kernel, out_shape, grid, num_warps, enable_fp_fusion=True, **constants):
    assert (arguments[1:], out_shape[0].shape, grid, enable_fp_fusion) == ((129,), (2, 48), (2,), False)
    return [X]


def call_of_0_4(*arguments, kernel, out_type, grid, num_warps, backend_options, **constants):
    return call_of_0_3(*arguments, kernel=kernel, out_shape=out_type, grid=grid, num_warps=num_warps, **backend_options)


@pytest.mark.parametrize("call", (call_of_0_3, call_of_0_4))
def test_both_versions_of_jax_triton_are_asked_not_to_contract(call, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=call))
    assert triton_call.run("kernel", [X], 129, [jax.ShapeDtypeStruct((2, 48), jnp.float32)], {"SIZE": 48}) == [X]
