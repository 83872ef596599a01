"""Which engine gets which requests."""

from __future__ import annotations

from collections.abc import Sequence

from trace_jax.rollout.engine import Request


def tokens_of(request: Request) -> int:
    """The most tokens that a request can have, prompt and answer: how long an answer becomes is not known before."""
    return request.tokens.size + request.max_new_tokens


def shares(requests: Sequence[Request], loads: Sequence[int]) -> list[list[Request]]:
    """Divides requests among engines, the longest first, each to the engine with the least to do (Graham, 1969).

    Args:
      loads: tokens that each engine has to do already.

    Returns:
      The requests of each engine, in the order in which they came. It depends on the arguments only.
    """
    loads = list(loads)
    owner: list[int] = [0] * len(requests)
    for index in sorted(range(len(requests)), key=lambda index: -tokens_of(requests[index])):
        owner[index] = min(range(len(loads)), key=loads.__getitem__)
        loads[owner[index]] += tokens_of(requests[index])
    return [[request for request, engine in zip(requests, owner, strict=True) if engine == number] for number in range(len(loads))]
