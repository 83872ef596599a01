"""Supervised steps on worked answers: the cold start before RL."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.plan import UNQUANTIZED
from trace_jax.sharding.axes import constrain
from trace_jax.sharding.mesh import batch_shards, on_its_mesh
from trace_jax.sharding.placement import put_rows
from trace_jax.sharding.rules import constrain_params
from trace_jax.tasks import Row
from trace_jax.tasks.source import shorten
from trace_jax.tokenizers import Tokenizer
from trace_jax.train.batches import TrainBatch
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs

LENGTH_MULTIPLE = 16


def worked_example(row: Row, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Token ids of a prompt with its worked answer and the end token, and the length of the prompt."""
    prompt = tokenizer.apply_prompt(row.prompt)
    return [*prompt, *tokenizer.encode(row.worked_answer), tokenizer.eos_id], len(prompt)


def sft_batch(rows: Sequence[Row], tokenizer: Tokenizer, length: int, mesh: Mesh | None = None) -> TrainBatch:
    """Worked answers padded to `length`; the answer and the end token enter the loss. A mesh gets equal numbers of rows per device."""
    shards = batch_shards(mesh)
    shape = (-(-len(rows) // shards) * shards, length)
    put = functools.partial(put_rows, mesh)
    tokens, segment, answer = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
    for index, row in enumerate(rows):
        ids, prompt = worked_example(row, tokenizer)
        tokens[index, : len(ids)] = ids
        segment[index, : len(ids)] = 1
        answer[index, prompt : len(ids)] = True
    zeros = put(np.zeros(shape, np.float32))
    return TrainBatch(
        tokens=put(tokens),
        positions=put(np.broadcast_to(np.arange(length, dtype=np.int32), shape)),
        segment_ids=put(segment),
        sampled=put(answer),
        logp_rollout=zeros,
        logp_old=None,
        advantages=zeros,
        divisors=None,
        temperature=put(np.ones(shape, np.float32)),
        routes=None,
        guides=None,
    )


def batch_width(rows: Sequence[Row], tokenizer: Tokenizer, context: int) -> int:
    """Width of a batch that fits the worked answer of any of the rows.

    Args:
      rows: at least one.
      context: tokens that the model can look at.

    Raises:
      UserError: an example is longer than the context.
    """
    lengths = [len(worked_example(row, tokenizer)[0]) for row in rows]
    longest = max(lengths)
    if longest > context:
        row = rows[lengths.index(longest)]
        raise UserError(
            f"prompt {row.prompt_id} ({shorten(' '.join(row.question.split()), 60)!r}) has {longest} tokens with its worked answer, more "
            f"than the context of {context} (max_position of the model); shorten the row, or remove it from the task"
        )
    return -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


@on_its_mesh
@functools.partial(jax.jit, static_argnames=("policy",))
def sft_gradient(params: Params, batch: TrainBatch, *, policy: Policy) -> tuple[Params, Float[Array, ""], Float[Array, ""]]:
    """Gradient of the mean negative log-likelihood per answer token, the loss, and the number of tokens (float32)."""

    def loss_fn(params: Params) -> tuple[Float[Array, ""], Float[Array, ""]]:
        logp, _, _ = batch_logprobs(params, {}, batch, ObjectiveSpec(policy, UNQUANTIZED))
        count = jnp.sum(batch.sampled, dtype=jnp.float32)
        return -jnp.sum(jnp.where(batch.sampled, logp, 0.0)) / jnp.maximum(count, 1.0), count

    (loss, count), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
    return constrain_params(gradient), constrain(loss), constrain(count)
