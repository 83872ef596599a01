"""One wave of requests: generated together, in few compiled shapes.

1. Pad the prompts to a common width and the rows to a power of two.
2. Prefill, then decode in chunks until every row is done.
3. Bring tokens, routes and records to the host.

A row's draws depend on its seed and positions only, never on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from trace_jax.models.registry import Params
from trace_jax.quantization.channels import Channels
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.rollout.embedded.assemble import WaveRecords
from trace_jax.rollout.embedded.decode import DecodeSpec, Drawn, Sampling, decode, prefill
from trace_jax.rollout.engine import Request

PROMPT_MULTIPLE = 16
DECODE_CHUNK = 32


def run_wave(
    requests: Sequence[Request], params: Params, multipliers: Multipliers, channels: Channels, spec: DecodeSpec, max_rows: int
) -> WaveRecords:
    """Generates the answers of a wave.

    Args:
      requests: at least one, at most `max_rows`.
      params, multipliers, channels: the engine's weights, in the compute dtype, its static multipliers, and its compensated channels.
      spec: static.
      max_rows: no more padding rows than up to here.

    Returns:
      Host arrays, one row per request and then the padding rows.
    """
    tokens, lengths, sampling, most_new = _pad_requests(requests, max_rows)
    width = tokens.shape[1]
    chunk = min(DECODE_CHUNK, max(1, most_new - 1))
    chunks = -(-(most_new - 1) // chunk)
    weights, slots = (params, multipliers, channels), width + 1 + chunks * chunk
    cache, state, drawn, fed = prefill(*weights, tokens, lengths, sampling, spec=spec, slots=slots)
    draws, feeds = [_columns(drawn)], [fed]
    for _ in range(chunks):
        if bool(jnp.all(state.done)):
            break
        cache, state, drawn, fed = decode(*weights, cache, state, sampling, spec=spec, steps=chunk)
        draws.append(drawn)
        feeds.append(fed)
    draws, feeds = jax.device_get((draws, feeds))
    return WaveRecords(
        prompt_width=width,
        token=np.concatenate([d.token for d in draws], axis=1),
        logprob=np.concatenate([d.logprob for d in draws], axis=1),
        live=np.concatenate([d.live for d in draws], axis=1),
        routes=np.concatenate([f.routes for f in feeds], axis=1),
        sites={site: _join([f.sites[site] for f in feeds]) for site in feeds[0].sites},
    )


def _pad_requests(requests: Sequence[Request], max_rows: int) -> tuple[Int32[Array, "B P"], Int32[Array, " B"], Sampling, int]:
    # At least two rows: a product with a single row is summed in another order on CPU, and its log-probs differ in the last bits.
    rows = max(2, len(requests), min(max_rows, 1 << (len(requests) - 1).bit_length()))
    longest = max(request.tokens.size for request in requests)
    width = -(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE
    stops = max(1, max(len(request.stop_token_ids) for request in requests))
    padded = list(requests) + [requests[0]] * (rows - len(requests))
    tokens = np.zeros((rows, width), np.int32)
    stop = np.full((rows, stops), -1, np.int32)
    for index, request in enumerate(padded):
        tokens[index, : request.tokens.size] = request.tokens
        stop[index, : len(request.stop_token_ids)] = request.stop_token_ids
    lengths = np.asarray([request.tokens.size for request in padded], np.int32)
    new = np.asarray([request.max_new_tokens for request in padded], np.int32)
    sampling = Sampling(
        seed=jnp.asarray([request.seed & 0xFFFFFFFF for request in padded], jnp.uint32),
        temperature=jnp.asarray([request.temperature for request in padded], jnp.float32),
        top_p=jnp.asarray([request.top_p for request in padded], jnp.float32),
        top_k=jnp.asarray([request.top_k for request in padded], jnp.int32),
        limit=jnp.asarray(lengths + new - 1),
        stop=jnp.asarray(stop),
    )
    return jnp.asarray(tokens), jnp.asarray(lengths), sampling, int(new.max())


def _columns(drawn: Drawn) -> Drawn:
    return jax.tree.map(lambda x: x[:, None], drawn)


def _join(parts: Sequence[dict[str, np.ndarray | None]]) -> dict[str, np.ndarray | None]:
    joined: dict[str, np.ndarray | None] = {}
    for name in parts[0]:
        arrays = [array for part in parts if (array := part[name]) is not None]
        joined[name] = np.concatenate(arrays, axis=2) if arrays else None
    return joined
