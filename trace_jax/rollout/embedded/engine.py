"""The embedded engine: batched generation in JAX, in the caller's process.

`poll` takes the oldest requests, at most `max_batch`, and runs them as one wave:

1. Pad the prompts to a common width and the rows to a power of two, so that few shapes are compiled.
2. Prefill, then decode in chunks until every row is done.
3. Bring tokens, routes and records to the host and cut them into trajectories.

A row's draws depend on its seed and positions only, never on its neighbours. Weights arrive quantized, layer by layer;
the engine holds them decoded to BF16 (exact), since no product here reads FP4 directly. The KV cache stays packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES, QuantPlan
from trace_jax.rollout.embedded.assemble import WaveRecords, assemble
from trace_jax.rollout.embedded.decode import CaptureSpec, DecodeSpec, Drawn, Sampling, decode, prefill
from trace_jax.rollout.engine import Capabilities, Health, PauseMode, Request
from trace_jax.rollout.trajectories import FinishReason, Trajectories
from trace_jax.rollout.weight_sync import decode_updates, expected_tensors
from trace_jax.rollout.weight_update import Ack, LayerUpdate, UpdateDigest

PROMPT_MULTIPLE = 16
DECODE_CHUNK = 32


class EmbeddedEngine:
    """A rollout engine for one policy; implements `trace_jax.rollout.Engine`.

    Args:
      policy: model and numerics shared with the trainer.
      plan: what the rollout rounds; its `weights` says in which format updates arrive.
      capture: the guidance record that trajectories carry.
      max_batch: most rows of a wave; None takes all that are queued.
    """

    def __init__(self, policy: Policy, plan: QuantPlan, capture: CaptureSpec, max_batch: int | None = None):
        self._policy = policy
        self._plan = plan
        self._capture = _available(capture, plan)
        self._max_batch = max_batch
        self._queue: deque[Request] = deque()
        self._aborted: list[Request] = []
        self._paused = False
        self._closed = False
        self._version = -1
        self._params: Params | None = None
        self._multipliers: dict[str, jax.Array] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises:
          UserError: a prompt and its answer do not fit the model's context, or a prompt holds a token the model does not have.
        """
        context, vocabulary = self._policy.config.max_position, self._policy.config.vocab_size
        for request in requests:
            if request.tokens.min() < 0 or request.tokens.max() >= vocabulary:
                raise UserError(
                    f"prompt {request.prompt_id} holds token ids outside 0..{vocabulary - 1}; "
                    "use the tokenizer that belongs to the model, or a model.config.vocab_size that covers it"
                )
            if request.tokens.size + request.max_new_tokens > context:
                raise UserError(
                    f"prompt {request.prompt_id} has {request.tokens.size} tokens; with max_new_tokens={request.max_new_tokens} "
                    f"that exceeds the context of {context}; shorten it, or lower rollout.max_new_tokens"
                )
        self._queue.extend(requests)

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """Runs one wave of the oldest requests and returns it; an empty batch when there is nothing to do."""
        parts = [self._ended(self._aborted)] if self._aborted else []
        self._aborted = []
        if self._queue and not self._paused:
            if self._params is None:
                raise RuntimeError("the engine has no weights yet: call update_weights first")
            wave = [self._queue.popleft() for _ in range(min(self._max_batch or len(self._queue), len(self._queue)))]
            parts.append(self._run(wave, self._params))
        if len(parts) == 2:
            return Trajectories.concat(parts)
        return parts[0] if parts else Trajectories.empty()

    def abort(self, sample_ids: Sequence[int]) -> None:
        """Ends queued requests; they come back without an answer at the next poll."""
        wanted = set(sample_ids)
        self._aborted += [request for request in self._queue if request.sample_id in wanted]
        self._queue = deque(request for request in self._queue if request.sample_id not in wanted)

    def pause(self, mode: PauseMode = "wait") -> None:
        """Stops taking requests; nothing is ever in flight between two polls, so `wait` and `keep` are the same."""
        self._paused = True
        if mode == "abort":
            self.abort([request.sample_id for request in self._queue])

    def resume(self) -> None:
        """Takes requests again."""
        self._paused = False

    def update_weights(self, updates: Iterator[LayerUpdate], version: int) -> Ack:
        """Takes in a complete set of weights; on an error the old ones stay.

        Raises:
          ValueError: a tensor is missing, unknown, sent twice, or has another shape or dtype than expected.
        """
        digest = UpdateDigest()
        received = list(digest.observe(updates))
        tensors = {name: tensor for update in received for name, tensor in update.tensors.items()}
        expected = expected_tensors(self._policy, self._plan)
        found = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        if found != expected:
            wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            first = wrong[0]
            raise ValueError(
                f"weight update does not fit the engine in {len(wrong)} tensors, first {first}: "
                f"sent {found.get(first, 'nothing')}, expected {expected.get(first, 'nothing')}"
            )
        self._params, self._multipliers = decode_updates(self._policy, self._plan, tensors)
        self._version = version
        return digest.ack(version)

    def capabilities(self) -> Capabilities:
        """What really executes: FP4 values and scales, products in the compute dtype on decoded operands."""
        plan = self._plan
        blocked = any(plan.site(site).format in BLOCK_FORMATS for site in RECORDED_SITES)
        return Capabilities(
            weights=plan.weights,
            activations=plan.expert_input.format,
            k=plan.k.format,
            v=plan.v.format,
            query=self._policy.compute_dtype,
            backend=f"jax on {jax.default_backend()}: operands decoded to {self._policy.compute_dtype}, float32 accumulation",
            record_kinds=("scales", "mantissa", "codes") if blocked else (),
            routes=True,
        )

    def health(self) -> Health:
        """State of the engine."""
        pending = len(self._queue) + len(self._aborted)
        return Health(not self._closed, "closed" if self._closed else "ready", pending, self._paused, self._version)

    def close(self) -> None:
        """Drops weights and requests."""
        self._closed = True
        self._params = None
        self._multipliers = {}
        self._queue.clear()
        self._aborted = []

    def _run(self, requests: list[Request], params: Params) -> Trajectories:
        audited = any(request.audit for request in requests)
        capture = self._capture
        if audited:
            everywhere = tuple(range(self._policy.config.num_layers))
            capture = _available(CaptureSpec("codes", RECORDED_SITES, everywhere), self._plan)
        truncated = any(request.top_p < 1 or request.top_k > 0 for request in requests)
        # The weights held here are decoded already; only activations and the cache are rounded in the forward pass.
        spec = DecodeSpec(self._policy, replace(self._plan, weights="bf16"), capture, truncated)
        tokens, lengths, sampling, most_new = _pad_requests(requests, self._max_batch or len(requests))
        width = tokens.shape[1]
        chunk = min(DECODE_CHUNK, max(1, most_new - 1))
        chunks = -(-(most_new - 1) // chunk)
        cache, state, drawn, fed = prefill(
            params, self._multipliers, tokens, lengths, sampling, spec=spec, slots=width + 1 + chunks * chunk
        )
        draws, feeds = [_columns(drawn)], [fed]
        for _ in range(chunks):
            if bool(jnp.all(state.done)):
                break
            cache, state, drawn, fed = decode(params, self._multipliers, cache, state, sampling, spec=spec, steps=chunk)
            draws.append(drawn)
            feeds.append(fed)
        draws, feeds = jax.device_get((draws, feeds))
        wave = WaveRecords(
            prompt_width=width,
            token=np.concatenate([d.token for d in draws], axis=1),
            logprob=np.concatenate([d.logprob for d in draws], axis=1),
            live=np.concatenate([d.live for d in draws], axis=1),
            routes=np.concatenate([f.routes for f in feeds], axis=1),
            sites={site: _join([f.sites[site] for f in feeds]) for site in feeds[0].sites},
        )
        config = self._policy.config
        return assemble(
            requests,
            wave,
            capture=capture,
            kept=self._capture,
            plan=self._plan,
            multipliers={name: np.asarray(value) for name, value in self._multipliers.items()},
            sizes={"expert_input": config.hidden_size, "k": config.head_dim, "v": config.head_dim},
            num_experts=config.num_experts,
            version=self._version,
        )

    def _ended(self, requests: Sequence[Request]) -> Trajectories:
        """Aborted requests as sequences of their prompt alone."""
        lengths = [request.tokens.size for request in requests]
        count = sum(lengths)
        return Trajectories(
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            tokens=np.concatenate([request.tokens for request in requests]).astype(np.int32),
            sampled=np.zeros(count, bool),
            logprobs=np.zeros(count, np.float32),
            weight_version=np.full(count, self._version, np.int32),
            sample_id=np.asarray([request.sample_id for request in requests], np.uint64),
            prompt_id=np.asarray([request.prompt_id for request in requests], np.uint64),
            group=np.asarray([request.group for request in requests], np.int64),
            attempt=np.asarray([request.attempt for request in requests], np.uint16),
            temperature=np.asarray([request.temperature for request in requests], np.float32),
            finish_reason=np.full(len(requests), FinishReason.ABORTED, np.uint8),
            reward=np.full(len(requests), np.nan, np.float32),
        )


def _available(capture: CaptureSpec, plan: QuantPlan) -> CaptureSpec:
    """The part of a capture that exists: sites in a block format."""
    sites = tuple(site for site in capture.sites if plan.site(site).format in BLOCK_FORMATS)
    if capture.kind == "none" or not sites or not capture.layers:
        return CaptureSpec()
    return CaptureSpec(capture.kind, sites, capture.layers)


def _pad_requests(requests: Sequence[Request], max_batch: int) -> tuple[Int32[Array, "B P"], Int32[Array, " B"], Sampling, int]:
    # At least two rows: a product with a single row is summed in another order on CPU, and its log-probs differ in the last bits.
    rows = max(2, len(requests), min(max_batch, 1 << (len(requests) - 1).bit_length()))
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
