"""FP4 number formats for JAX: quantizers, fake quantization, guided rounding, and their kernels.

The numeric contract is in docs/numerics.md. Every function works on the last axis (the contraction axis), under jit,
vmap, scan and checkpoint; the fake quantizers have straight-through gradients.

    q = quantize(round_to_bf16(weight), NVFP4)      # codes, scales, multiplier
    w = dequantize(q)                               # bfloat16
    y = fake_quant(x, NVFP4, multiplier)            # == dequantize(quantize(x, NVFP4, multiplier), x.dtype)
    y = guided_fake_quant(x, guide, NVFP4, multiplier)

`pallas_kernels.oracle` repeats all of it in NumPy, independently, for tests.
"""

from pallas_kernels.containers import Guide, Quantized
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat, block_format
from pallas_kernels.fp8 import fake_quant_fp8
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.multiplier import decode_multiplier
from pallas_kernels.packing import mantissa_bits, pack_bits, pack_codes, unpack_bits, unpack_codes
from pallas_kernels.quantize.api import quantize
from pallas_kernels.rounding import as_stored, count_nonfinite, keep_rounding, round_to_bf16

__all__ = [
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "Guide",
    "Quantized",
    "as_stored",
    "block_format",
    "count_nonfinite",
    "decode_multiplier",
    "dequantize",
    "fake_quant",
    "fake_quant_fp8",
    "guided_fake_quant",
    "keep_rounding",
    "mantissa_bits",
    "pack_bits",
    "pack_codes",
    "quantize",
    "round_to_bf16",
    "unpack_bits",
    "unpack_codes",
]
