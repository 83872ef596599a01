"""Attention in the trainer's order of rounding, over plain rows of keys and values in vLLM's cache.

vLLM's kernels fold the softmax into blocks of keys and do not round the attention weights as the trainer does, to the model's type. The
cache has the shape that vLLM gives it on CPU and for FlashAttention, [blocks, KV heads, slots, 2 head_dim]; a row is key, then value.
"""

from typing import Any

import torch
from torch import Tensor


class PlainAttention:
    """Mixed into an attention implementation of vLLM: causal attention of decoders without further options."""

    def plain(self, dtype: torch.dtype) -> bool:
        """Whether this layer computes queries of that type here, and keeps such rows in its cache; otherwise vLLM's own kernel does."""
        raise NotImplementedError

    def do_kv_cache_update(self, layer, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores key and value [tokens, KV heads, head_dim] at their slots; tokens with a negative slot are padding."""
        if not self.plain(key.dtype):
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)  # pyright: ignore[reportAttributeAccessIssue]
        real = slot_mapping >= 0
        slots, rows = slot_mapping[real], torch.cat([key, value], dim=-1)[: slot_mapping.shape[0]][real]
        size = kv_cache.shape[2]
        kv_cache[slots // size, :, slots % size] = rows.to(kv_cache.dtype)

    def forward(
        self, layer, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata, output: Tensor, *scales, **options
    ):
        """Writes the attended values [tokens, heads, head_dim] into `output` and returns it."""
        if not self.plain(query.dtype) or attn_metadata is None or not _causal(attn_metadata):
            vllm: Any = super()
            return vllm.forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **options)
        starts = attn_metadata.query_start_loc.tolist()
        lengths, table = attn_metadata.seq_lens, attn_metadata.block_table
        counts = [end - start for start, end in zip(starts[:-1], starts[1:], strict=True)]
        single = [index for index, count in enumerate(counts) if count == 1]
        groups = [single] if single else []
        scale = self.scale  # pyright: ignore[reportAttributeAccessIssue]
        for group in groups + [[index] for index, count in enumerate(counts) if count > 1]:
            rows = torch.tensor([range(starts[index], starts[index + 1]) for index in group], device=query.device)
            longest = int(lengths[group].max())
            keys, values = _gathered(kv_cache, table[group], longest)
            output[rows] = attend(query[rows], keys, values, lengths[group], scale).to(output.dtype)
        return output


def without_options(implementation: Any) -> bool:
    """Whether an attention implementation of vLLM has none of the options that `attend` lacks."""
    return (
        implementation.attn_type == "decoder"
        and implementation.sliding_window in (-1, (-1, -1))
        and implementation.logits_soft_cap == 0
        and implementation.alibi_slopes is None
        and implementation.sinks is None
        and implementation.kv_cache_dtype in ("auto", "bfloat16", "float16")
    )


def _causal(attn_metadata: Any) -> bool:
    return getattr(attn_metadata, "dynamic_causal", None) is None and attn_metadata.causal is True


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """Scaled dot-product attention in the trainer's order: scores and softmax in float32, weights rounded, one rounding at the end.

    Args:
      query: the last T tokens of every sequence, [B, T, H, head_dim].
      key, value: [B, S, K, head_dim].
      lengths: tokens of every sequence, integers [B]; what lies behind them is never looked at.
      scale: of the scores.

    Returns:
      [B, T, H, head_dim] in the dtype of the query.
    """
    batch, tokens, heads, width = query.shape
    grouped = query.reshape(batch, tokens, key.shape[2], -1, width).to(torch.float32)
    scores = torch.einsum("btkgh,bskh->bkgts", grouped, key.to(torch.float32)) * scale
    positions = torch.arange(key.shape[1], device=query.device)
    last = lengths[:, None] - tokens + torch.arange(tokens, device=query.device)  # position of each query
    seen = positions[None, None, :] <= last[:, :, None]
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(dim=-1).to(query.dtype)
    value = value.masked_fill((positions[None, :] >= lengths[:, None])[:, :, None, None], 0.0)  # stale memory may hold NaN
    attended = torch.einsum("bkgts,bskh->btkgh", weights.to(torch.float32), value.to(torch.float32))
    return attended.reshape(batch, tokens, heads, width).to(query.dtype)


def _gathered(kv_cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [B, length, K, head_dim] of sequences whose blocks the table names."""
    size = kv_cache.shape[2]
    blocks = kv_cache[table[:, : -(-length // size)]]  # [B, blocks, K, size, 2 head_dim]
    rows = blocks.movedim(2, 3).flatten(1, 2)[:, :length]
    key, value = rows.chunk(2, dim=-1)
    return key, value
