"""The layers between the quantized products, in the trainer's order of rounding, wherever the products are emulated.

In float32 they compute what vLLM's own do. In BF16 vLLM's round at other places, and every last bit is a chance of another FP4 code:

    norm       after the residual is added and rounded, all in float32, rounded once; vLLM's normalises the unrounded sum, and rounds
               before the weight is multiplied
    RoPE       cosines and sines in float32; vLLM's table is in the model's type
    router     logits in float32 from operands of the model's type, so near-equal experts are told apart; vLLM's logits are BF16
    head       the same for the vocabulary's logits

Each replaces the class of that name in vLLM. Imports vllm.
"""

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


@CustomOp.register_oot(name="RMSNorm")
class ReferenceRMSNorm(RMSNorm):
    """x / rms(x) * weight in float32 with one rounding at the end."""

    def forward_native(self, x: Tensor, residual: Tensor | None = None):
        """The normalised x, or the normalised x + residual and that sum."""
        if self.variance_size_override is not None or not self.has_weight:
            return super().forward_native(x, residual)
        total = x if residual is None else x + residual
        wide = total.to(torch.float32)
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * inverse * self.weight.to(torch.float32)).to(x.dtype)
        return normed if residual is None else (normed, total)

    forward_cuda = forward_native


@CustomOp.register_oot(name="RotaryEmbedding")
class ReferenceRotaryEmbedding(RotaryEmbedding):
    """Rotation by angles, cosines and products in float32."""

    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype, init_cache=True) -> None:
        super().__init__(head_size, rotary_dim, max_position_embeddings, base, is_neox_style, torch.float32, init_cache)

    def _compute_inv_freq(self, base: float) -> Tensor:
        half = self.rotary_dim // 2
        return torch.pow(torch.tensor(base, dtype=torch.float32), -torch.arange(half, dtype=torch.float32) / half)

    def _match_cos_sin_cache_dtype(self, query: Tensor) -> Tensor:
        return self.cos_sin_cache

    def forward_native(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The rotated query and key, [tokens, heads * head_size]."""
        cos, sin = self.cos_sin_cache.index_select(0, positions.flatten())[:, None, :].chunk(2, dim=-1)

        def rotated(x: Tensor) -> Tensor:
            heads = x.reshape(positions.numel(), -1, self.head_size).to(torch.float32)
            turned, rest = heads[..., : self.rotary_dim], heads[..., self.rotary_dim :]
            if self.is_neox_style:
                first, second = turned.chunk(2, dim=-1)
            else:
                first, second = turned[..., ::2], turned[..., 1::2]
            pair = (first * cos - second * sin, second * cos + first * sin)
            turned = torch.cat(pair, dim=-1) if self.is_neox_style else torch.stack(pair, dim=-1).flatten(-2)
            return torch.cat([turned, rest], dim=-1).to(x.dtype).reshape(x.shape)

        return rotated(query), None if key is None else rotated(key)

    forward_cpu = forward_cuda = forward_native


@PluggableLayer.register_oot(name="GateLinear")
class ReferenceGateLinear(GateLinear):
    """The router's logits in float32."""

    _cpu_skip_gemm_dispatch = True  # vLLM keeps the weight as it was loaded

    def forward(self, x: Tensor):
        """Logits [tokens, experts], float32."""
        return router_logits(self, x) if isinstance(self.quant_method, UnquantizedLinearMethod) else super().forward(x)


def router_logits(layer: torch.nn.Module, x: Tensor):
    """The output of an unquantized linear layer in float32, in the form in which its caller wants it."""
    bias = None if layer.bias is None else layer.bias.to(torch.float32)
    logits = linear(x.to(torch.float32), layer.weight.to(torch.float32), bias)
    return (logits, None) if layer.return_bias else logits


@PluggableLayer.register_oot(name="LogitsProcessor")
class ReferenceLogitsProcessor(LogitsProcessor):
    """The vocabulary's logits in float32, as vLLM's option `head_dtype` makes them."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        self.head_dtype = torch.float32
