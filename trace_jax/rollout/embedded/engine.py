"""The embedded engine: batched generation in JAX, in the caller's process.

`poll` takes the oldest requests, at most `max_batch`, runs them as one wave (`wave.py`) and cuts the result into
trajectories (`assemble.py`). Weights arrive quantized, layer by layer; the engine holds them decoded to BF16 (exact), since
no product here reads FP4 directly. The KV cache stays packed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np

from trace_jax.errors import UserError
from trace_jax.models.policy import Policy
from trace_jax.models.registry import Params
from trace_jax.quantization.channels import Channels, with_channel_columns
from trace_jax.quantization.plan import BLOCK_FORMATS, RECORDED_SITES, QuantPlan
from trace_jax.rollout.embedded.assemble import assemble, without_answers
from trace_jax.rollout.embedded.decode import CaptureSpec, DecodeSpec
from trace_jax.rollout.embedded.wave import run_wave
from trace_jax.rollout.engine import Capabilities, Health, PauseMode, Request, require_room
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.rollout.weight_sync import decode_updates, expected_tensors
from trace_jax.rollout.weight_update import Ack, LayerUpdate, UpdateDigest


class EmbeddedEngine:
    """A rollout engine for one policy; implements `trace_jax.rollout.Engine`.

    Args:
      policy: model and numerics shared with the trainer.
      plan: what the rollout rounds; its `weights` says in which format updates arrive.
      capture: the guidance record that trajectories carry.
      max_batch: most rows of a wave; None takes all that are queued.
      channels: channels of the experts' inputs whose residual is compensated; None compensates nothing.
    """

    def __init__(
        self, policy: Policy, plan: QuantPlan, capture: CaptureSpec, max_batch: int | None = None, channels: Channels | None = None
    ):
        self._policy = policy
        self._plan = plan
        require_cache_formats(policy, plan)
        self._capture = _available(capture, plan, policy)
        self._max_batch = max_batch
        self._channels = channels or {}
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
        require_room(requests, context=self._policy.config.max_position, vocabulary=self._policy.config.vocab_size)
        self._queue.extend(requests)

    def poll(self, timeout: float = 0.0) -> Trajectories:
        """Runs one wave of the oldest requests and returns it; an empty batch when there is nothing to do."""
        parts = [without_answers(self._aborted, self._version)] if self._aborted else []
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
        params, self._multipliers = decode_updates(self._policy, self._plan, tensors)
        self._params = with_channel_columns(params, self._channels, stacks=self._policy.config.stacks) if self._channels else params
        self._version = version
        return digest.ack(version)

    def capabilities(self) -> Capabilities:
        """What really executes: FP4 values and scales, products in the compute dtype on decoded operands."""
        plan = self._plan
        blocked = any(plan.site(site).format in BLOCK_FORMATS for site in RECORDED_SITES)
        fraction = self._channels["expert_input"].shape[1] / self._policy.config.hidden_size if self._channels else 0.0
        return Capabilities(
            weights=plan.weights,
            activations=plan.expert_input.format,
            k=plan.k.format,
            v=plan.v.format,
            query=self._policy.compute_dtype,
            backend=f"jax on {jax.default_backend()}: operands decoded to {self._policy.compute_dtype}, float32 accumulation",
            record_kinds=("scales", "mantissa", "codes") if blocked else (),
            routes=True,
            residual_fraction=fraction,
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
        capture = self._capture
        if any(request.audit for request in requests):
            everywhere = tuple(range(self._policy.config.num_layers))
            capture = _available(CaptureSpec("codes", RECORDED_SITES, everywhere), self._plan, self._policy)
        truncated = any(request.top_p < 1 or request.top_k > 0 for request in requests)
        # The weights held here are decoded already; only activations and the cache are rounded in the forward pass.
        spec = DecodeSpec(self._policy, replace(self._plan, weights="bf16"), capture, truncated)
        wave = run_wave(requests, params, self._multipliers, self._channels, spec, self._max_batch or len(requests))
        config = self._policy.config
        return assemble(
            requests,
            wave,
            capture=capture,
            kept=self._capture,
            plan=self._plan,
            multipliers={name: np.asarray(value) for name, value in self._multipliers.items()},
            config=config,
            version=self._version,
        )


def require_cache_formats(policy: Policy, plan: QuantPlan) -> None:
    """Refuses a rounded cache where the family's cache holds something else than keys and values.

    Raises:
      UserError: naming the family and the reason.
    """
    rounded = [site for site in ("k", "v") if plan.site(site).format != "bf16" and not policy.config.layers_of(site)]
    if rounded:
        raise UserError(
            f"rollout.kv_cache.{rounded[0]} is {plan.site(rounded[0]).format}, but {policy.family} {policy.config.CACHE_REASON}; "
            "write rollout.kv_cache: {k: bf16, v: bf16} and train_quant.kv_cache: none"
        )


def _available(capture: CaptureSpec, plan: QuantPlan, policy: Policy) -> CaptureSpec:
    """The part of a capture that exists: sites in a block format that some of the layers have."""
    config = policy.config
    sites = tuple(
        site for site in capture.sites if plan.site(site).format in BLOCK_FORMATS and set(capture.layers) & set(config.layers_of(site))
    )
    if capture.kind == "none" or not sites:
        return CaptureSpec()
    return CaptureSpec(capture.kind, sites, capture.layers)
