"""Implementations of others, for rows of compiled kernels at real shapes. What is not installed, or refuses, is not a peer."""

import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.benchmark.cases import Peer
from pallas_kernels.benchmark.timing import Call
from pallas_kernels.grouped_matmul.reference import GRAD_WEIGHTS

TOKAMAX = "tokamax ragged_dot"


def ragged_products(product: str, left: Array, right: Array, group_sizes: Int[Array, " E"]) -> tuple[Peer, ...]:
    """tokamax's GPU kernels for one of the three grouped products, operands as in `grouped_matmul.reference`; none without tokamax.

    Its kernel for Hopper is made for weights that lie as ours do, so they are handed over as a transposed view of [E, F, K].
    """
    try:
        tokamax: Any = importlib.import_module("tokamax")
    except ImportError:
        return ()

    def function(implementation: str):
        options = {"preferred_element_type": jnp.bfloat16, "implementation": implementation}
        if product == "grad_weights":
            return lambda left, right, sizes: tokamax.ragged_dot_general(
                left, right, group_sizes=sizes, ragged_dot_dimension_numbers=GRAD_WEIGHTS, **options
            )
        if product == "grad_x":
            return lambda left, right, sizes: tokamax.ragged_dot(left, right, sizes, **options)
        return lambda left, right, sizes: tokamax.ragged_dot(left, jnp.swapaxes(right, 1, 2), sizes, **options)

    return tuple(Peer(f"{TOKAMAX} ({name})", Call(function(name), (left, right, group_sizes))) for name in ("mosaic", "triton"))


def bf16_attention(query: Float[Array, "B H D"], keys: Float[Array, "B S K D"], values: Float[Array, "B S K D"]) -> tuple[Peer, ...]:
    """BF16 attention of one query token a sequence over whole caches: cuDNN and XLA.

    Without a mask the heads that share a KV head are as good as several tokens of one head, which is how a kernel written for
    many query tokens reads the cache once for all of them; cuDNN gets the query in both forms.
    """
    batch, _, kv_heads, head_dim = keys.shape
    moved = query.nbytes * 2 + keys.nbytes + values.nbytes
    grouped = query.reshape(batch, kv_heads, -1, head_dim)

    def one_token(implementation):
        return lambda q, k, v: jax.nn.dot_product_attention(q[:, None], k, v, implementation=implementation)

    def as_tokens(q, k, v):
        return jax.nn.dot_product_attention(jnp.swapaxes(q, 1, 2), k, v, implementation="cudnn")

    candidates = {
        "cuDNN bf16 attention": (one_token("cudnn"), query),
        "cuDNN bf16 attention, heads as tokens": (as_tokens, grouped),
        "XLA bf16 attention": (one_token("xla"), query),
    }
    return tuple(Peer(name, Call(function, (q, keys, values)), moved) for name, (function, q) in candidates.items())
