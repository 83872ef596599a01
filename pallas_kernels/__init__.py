"""FP4 number formats for JAX: quantizers, fake quantization, guided rounding, products and attention on FP4 data, and their kernels.

The numeric contract is in docs/numerics.md. Every quantizer works on the last axis (the contraction axis), under jit,
vmap, scan and checkpoint; the fake quantizers have straight-through gradients.

    q = quantize(round_to_bf16(weight), NVFP4)      # codes, scales, multiplier
    w = dequantize(q)                               # bfloat16
    y = fake_quant(x, NVFP4, multiplier)            # == dequantize(quantize(x, NVFP4, multiplier), x.dtype)
    y = guided_fake_quant(x, guide, NVFP4, multiplier)
    y = rms_norm_fake_quant(x, weight, eps, NVFP4, multiplier, guide)     # either of the two, of a norm; in one pass
    y = swiglu_fake_quant(gate, up, NVFP4, multiplier)
    y = rope_fake_quant(keys, *rope_tables(positions, head_dim, theta), NVFP4, multiplier, guide)
    y, rest = residual_fake_quant(x, channels, NVFP4, multiplier)         # and what was left over in some channels, rounded too

    y = grouped_matmul(rows, weights, group_sizes)                   # the experts of a layer, differentiable
    y = grouped_matmul_w4a16(rows, prepare_w4(q), group_sizes)       # the same from FP4 weights
    cache = kv_append(cache, keys, values, positions)                 # FP4 keys and values in pages
    y = decode_attention(queries, cache, scale)

`pallas_kernels.oracle` repeats all of it in NumPy, independently, for tests.
"""

from pallas_kernels.containers import Guide, Quantized
from pallas_kernels.decode_attention.api import decode_attention
from pallas_kernels.decode_attention.paged_kv import PagedKV, empty_paged_kv
from pallas_kernels.dequantize.api import dequantize
from pallas_kernels.fake_quant.api import fake_quant
from pallas_kernels.formats import MXFP4, NVFP4, BlockFormat, block_format
from pallas_kernels.fp8 import fake_quant_fp8
from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul_w4.api import grouped_matmul_w4a16, matmul_w4
from pallas_kernels.grouped_matmul_w4.layout import W4Weights, prepare_w4
from pallas_kernels.guided_fake_quant.api import guided_fake_quant
from pallas_kernels.kv_append.api import append as kv_append
from pallas_kernels.multiplier import decode_multiplier
from pallas_kernels.packing import mantissa_bits, pack_bits, pack_codes, unpack_bits, unpack_codes
from pallas_kernels.quantize.api import quantize
from pallas_kernels.residual_fake_quant.api import residual_fake_quant
from pallas_kernels.rms_norm_fake_quant.api import rms_norm_fake_quant
from pallas_kernels.rope_fake_quant.api import rope_fake_quant
from pallas_kernels.rope_fake_quant.rule import rope_tables, rotate
from pallas_kernels.rounding import as_stored, count_nonfinite, keep_rounding, round_to_bf16
from pallas_kernels.swiglu_fake_quant.api import swiglu_fake_quant

__all__ = [
    "MXFP4",
    "NVFP4",
    "BlockFormat",
    "Guide",
    "PagedKV",
    "Quantized",
    "W4Weights",
    "as_stored",
    "block_format",
    "count_nonfinite",
    "decode_attention",
    "decode_multiplier",
    "dequantize",
    "empty_paged_kv",
    "fake_quant",
    "fake_quant_fp8",
    "grouped_matmul",
    "grouped_matmul_w4a16",
    "guided_fake_quant",
    "keep_rounding",
    "kv_append",
    "mantissa_bits",
    "matmul_w4",
    "pack_bits",
    "pack_codes",
    "prepare_w4",
    "quantize",
    "residual_fake_quant",
    "rms_norm_fake_quant",
    "rope_fake_quant",
    "rope_tables",
    "rotate",
    "round_to_bf16",
    "swiglu_fake_quant",
    "unpack_bits",
    "unpack_codes",
]
