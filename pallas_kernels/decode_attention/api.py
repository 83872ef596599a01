"""`decode_attention`: the user's function."""

from jaxtyping import Array, Float

from pallas_kernels.decode_attention import reference
from pallas_kernels.decode_attention.paged_kv import PagedKV
from pallas_kernels.implementation import dispatch


def decode_attention(
    query: Float[Array, "B H D"], cache: PagedKV, scale: float, *, implementation: str | None = None
) -> Float[Array, "B H D"]:
    """Attention of one query token a sequence over the tokens in a paged FP4 cache, the newest included.

    Query head h reads KV head h // (H / K). Softmax and sums are float32; the kernel rounds the softmax weights to bfloat16
    before the product with the values, as BF16 attention kernels do. There is no gradient.

    Args:
      query: bfloat16[B, H, D] after RoPE, H a multiple of the cache's K.
      cache: the cache; page numbers below a sequence's length must be valid.
      scale: factor of the scores, > 0, usually D ** -0.5.
      implementation: "reference", "pallas" or None for the best one here.

    Returns:
      bfloat16[B, H, D]; zeros for a sequence of length 0. A key block with a NaN scale makes all outputs of its KV head NaN, a
      value block its own outputs.

    Raises:
      ValueError: query and cache do not belong together, or scale <= 0.
      NotImplementedError: the asked-for implementation cannot serve, with the reason.
    """
    batch, heads, size = query.shape
    kv_heads = cache.key_codes.shape[1]
    if (batch, size) != (cache.page_table.shape[0], cache.head_dim) or heads % kv_heads:
        raise ValueError(
            f"query {query.shape} does not fit a cache of {cache.page_table.shape[0]} sequences, {kv_heads} KV heads and head_dim "
            f"{cache.head_dim}; pass [B, H, D] with H a multiple of the KV heads"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}; usually it is head_dim ** -0.5")

    def pallas():
        from pallas_kernels.decode_attention import pallas as kernel

        return kernel.decode_attention(query, cache, float(scale))

    return dispatch(
        "decode_attention", implementation, reference=lambda: reference.decode_attention(query, cache, float(scale)), pallas=pallas
    )
