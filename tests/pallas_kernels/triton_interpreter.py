"""Runs the Triton kernels on CPU, in the interpreter that comes with Triton (TRITON_INTERPRET=1, set in conftest.py).

The interpreter is made for torch tensors; `Memory` gives it NumPy arrays. It truncates where it should round to bfloat16, which a GPU
does in one correct instruction, so that rounding is replaced by the cast of ml_dtypes.
"""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from pallas_kernels import triton_call
from pallas_kernels.triton_kernels.tile import locate

PROGRAMS = 2
"""An interpreted program costs a tenth of a second whatever it does; two of them show that tiles fit together."""

LARGEST_TILE = 2**14  # in groups; Triton allows 2^20 values

FLOATS = {"bf16": ml_dtypes.bfloat16, "fp32": np.float32}


class Memory:
    """What the interpreter asks of a torch tensor on CPU, for a NumPy array."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, array.dtype

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def _same(self, *_, **__) -> Memory:
        return self

    untyped_storage = cpu = new_empty = _same

    def _nothing(self, *_) -> None:
        pass

    set_ = storage_offset = size = stride = copy_ = _nothing


def run(kernel, inputs, groups, outputs, constants):
    """In place of `triton_call.run`."""
    tile = min(1 << max((-(-groups // PROGRAMS) - 1).bit_length(), 4), LARGEST_TILE)

    def interpret(*arrays):
        # A byte or value that the kernel does not write is seen.
        results = [np.full(out.shape, 0xEE if out.dtype == np.uint8 else -77, out.dtype) for out in outputs]
        memory = [Memory(np.array(array)) for array in arrays]
        with np.errstate(all="ignore"):
            kernel[(-(-groups // tile),)](*memory, groups, *map(Memory, results), TILE=tile, **constants)
        return tuple(results)

    return jax.pure_callback(interpret, tuple(outputs), *inputs)


def cast(values, source, target, rounding):
    return values.view(FLOATS[source.name]).astype(FLOATS[target.name]).view(f"uint{target.primitive_bitwidth}")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bindings run their kernels in the interpreter."""
    monkeypatch.setattr(interpreter, "_convert_float", cast)
    monkeypatch.setattr(triton_call, "run", run)


@triton.jit
def first_entries(pointer, groups, out, ROW: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr):
    """Where `locate` finds the groups of a tile, as int64 offsets; -1 for those beyond the last."""
    first, exists, entries = locate(pointer, groups, ROW, WIDTH, TILE)
    tl.store(out + tl.arange(0, TILE), tl.where(exists, first.to(tl.int64) - pointer.to(tl.int64), -1))


def offsets_of_program(number: int, groups: int, row: int, width: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """`first_entries` of the program with a number."""
    program = interpreter.TensorHandle(np.array([number], np.int32), tl.int32)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_get_program_id", lambda axis: program)
    out = np.zeros(tile, np.int64)
    first_entries[(1,)](Memory(np.zeros(1, np.uint8)), groups, Memory(out), row, width, tile)
    return out.tolist()
