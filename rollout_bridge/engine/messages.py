"""Requests as messages, and finished answers as trajectories."""

from __future__ import annotations

import numpy as np

from rollout_bridge.vllm_plugin.serve.channel import Message
from trace_jax.rollout.embedded.assemble import without_answers
from trace_jax.rollout.engine import Request
from trace_jax.rollout.trajectories import FinishReason, Trajectories

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def request_message(number: int, request: Request) -> Message:
    """A request as it travels: `number` names it for the worker, since a sample may be generated again under its id."""
    return {
        "id": number,
        "sample": request.sample_id,
        "attempt": request.attempt,
        "tokens": request.tokens.tolist(),
        "max_new_tokens": request.max_new_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "seed": request.seed & 0xFFFFFFFF,
        "stop_token_ids": list(request.stop_token_ids),
        "audit": request.audit,
    }


def answered(request: Request, finished: Message) -> Trajectories:
    """A finished request as a batch of one.

    Args:
      finished: the worker's message: `tokens`, `logprobs`, `reason`, and `versions` as runs of [version, number of tokens].
    """
    prompt, answer = request.tokens.size, np.asarray(finished["tokens"], np.int32)
    versions, counts = np.asarray(finished["versions"], np.int32).T
    logprobs = np.asarray(finished["logprobs"], np.float32)
    return without_answers([request], int(versions[0])).replace(
        offsets=np.asarray([0, prompt + answer.size], np.int64),
        tokens=np.concatenate([request.tokens, answer]),
        sampled=np.arange(prompt + answer.size) >= prompt,
        logprobs=np.concatenate([np.zeros(prompt, np.float32), logprobs]),
        weight_version=np.concatenate([np.full(prompt, versions[0], np.int32), np.repeat(versions, counts)]),
        finish_reason=np.asarray([REASONS[finished["reason"]]], np.uint8),
    )
