"""Compares vLLM's native NVFP4 quantizer with the canonical one, on a GPU that has FP4 tensor cores. Never run yet: there was none.

    python -m rollout_bridge.vllm_plugin.blackwell_selftest [--rows 4096] [--width 2048]

Prints one JSON object. `codes_differ` and `scales_differ` are to be 0 for BF16 input under the stored (nudged) multiplier, and small with
ties only under the plain power of two; -0 counts as 0. Exit code 0 if the nudged comparison is exact, 1 if not, 2 without such a GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from rollout_bridge.vllm_plugin.numerics import NVFP4, decode_multiplier, quantize, unpack_codes
from rollout_bridge.vllm_plugin.numerics.swizzle import unswizzle_scales

NativeQuantizer = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x[rows, d], reciprocal multiplier) -> packed codes [rows, d / 2] and swizzled scale bytes."""


def compare(native: NativeQuantizer, x: Tensor, nudged: bool) -> dict[str, int]:
    """How often a native quantizer differs from the canonical one for BF16 x[rows, d], under the multiplier of its own amax."""
    multiplier = decode_multiplier(x.abs().max(), nudged=nudged)
    ours = quantize(x, NVFP4, multiplier)
    codes, scales = native(x, 1 / multiplier)
    theirs = unpack_codes(codes.view(torch.uint8), x.shape[-1])
    linear = unswizzle_scales(scales.view(torch.uint8).flatten(), *ours.scales.shape)
    same_scale = (linear == ours.scales).repeat_interleave(NVFP4.block, dim=-1)
    different = theirs.masked_fill(theirs == 8, 0) != unpack_codes(ours.codes, x.shape[-1])
    return {
        "values": x.numel(),
        "codes_differ": int(different.sum()),
        "codes_differ_under_equal_scales": int((different & same_scale).sum()),
        "scales_differ": int((linear != ours.scales).sum()),
    }


def inputs(rows: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """BF16 inputs [rows, width]: normal values, values of many magnitudes, and every pattern within 2^-8 to 2^8 of one."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, width, generator=generator)
    spread = normal * torch.exp2(torch.randint(-6, 7, (rows, 1), generator=generator).to(torch.float32))
    patterns = torch.arange(0x3B80, 0x4380, dtype=torch.int16).view(torch.bfloat16).to(torch.float32)
    every = patterns[torch.randint(0, patterns.numel(), (rows, width), generator=generator)]
    return {name: x.to(device, torch.bfloat16) for name, x in (("normal", normal), ("spread", spread), ("patterns", every))}


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="compare vLLM's native NVFP4 quantizer with trace-jax's")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=2048)
    chosen = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10:
        print("error: this needs an NVIDIA GPU of compute capability 10.0 or higher; run it there", file=sys.stderr)
        return 2
    from vllm._custom_ops import scaled_fp4_quant

    result: dict[str, dict[str, int]] = {}
    for name, x in inputs(chosen.rows, chosen.width, torch.device("cuda")).items():
        for label, nudged in (("nudged", True), ("plain", False)):
            result[f"{name}/{label}"] = compare(scaled_fp4_quant, x, nudged)
    exact = all(not row["codes_differ"] and not row["scales_differ"] for name, row in result.items() if name.endswith("nudged"))
    print(json.dumps({"device": torch.cuda.get_device_name(), "exact": exact, "comparisons": result}))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
