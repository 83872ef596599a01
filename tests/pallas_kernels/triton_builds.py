"""Compiles Triton kernels for GPUs that need not be there and prints a JSON list of what came out.

A program, since a process that interprets Triton kernels cannot compile them.
"""

from __future__ import annotations

import json
import struct

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat
from pallas_kernels.triton_kernels.dequantize import dequantize
from pallas_kernels.triton_kernels.fake_quant import fake_quant
from pallas_kernels.triton_kernels.guided_fake_quant import guided_fake_quant
from pallas_kernels.triton_kernels.quantize import quantize

THREADS = 128
EXECUTABLE = 4
VALUES = dict.fromkeys(("x", "out"), "*bf16")
OTHERS = {"valid": "*i1", "multiplier": "*fp32", "rollout_multiplier": "*fp32", "groups": "i32"}  # what is not among them are bytes
ROW_VALUES = {"EACH_ROW": True, "VALID_EACH_ROW": True, "ROLLOUT_EACH_ROW": True}

BUILDS = (
    (quantize, NVFP4, 90, {}),
    (dequantize, NVFP4, 90, {}),
    (fake_quant, NVFP4, 90, {}),
    (fake_quant, MXFP4, 90, {}),
    (guided_fake_quant, NVFP4, 90, {"KIND": "mantissa"}),
    (guided_fake_quant, MXFP4, 90, {"KIND": "codes"}),
    (quantize, MXFP4, 100, {}),
    (guided_fake_quant, NVFP4, 100, {"KIND": "mantissa"}),
    (quantize, NVFP4, 90, {"SIZE": 33}),
    (guided_fake_quant, NVFP4, 90, {"KIND": "codes", "SIZE": 33}),
)


def build(kernel, fmt: BlockFormat, capability: int, constants: dict) -> dict:
    """Name, target and PTX of a kernel for bfloat16 rows, of 2048 values if not named, and its machine instructions for each value."""
    fixed = {"SIZE": 2048, "BLOCK": fmt.block, "SCALE": fmt.scale, "TILE": THREADS, **ROW_VALUES, **constants}
    signature = {name: "constexpr" if name in fixed else (VALUES | OTHERS).get(name, "*u8") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if signature[name].startswith("*")}
    source = ASTSource(kernel, signature, {name: fixed[name] for name in kernel.arg_names if name in fixed}, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "enable_fp_fusion": False})
    return {
        "name": " ".join(map(str, [kernel.__name__, fmt.name, *constants.values()])),
        "capability": capability,
        "size": fixed["SIZE"],
        "ptx": compiled.asm["ptx"],
        "shared_bytes": compiled.metadata.shared,
        "instructions": instructions(compiled.asm["cubin"]) / fmt.block,
    }


def instructions(cubin: bytes) -> int:
    """Machine instructions of 16 bytes in the executable sections of an ELF file, padding included."""
    (table,), (entry, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + entry * number) for number in range(count)]
    return sum(size for _, _, flags, _, _, size in sections if flags & EXECUTABLE) // 16


if __name__ == "__main__":
    print(json.dumps([build(*each) for each in BUILDS]))
