"""A tiny random policy, an engine that serves it, and the trainer's view of what the engine generated."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance.site_record import RecordKind
from trace_jax.models.policy import Policy
from trace_jax.models.qwen3_moe.config import Qwen3MoeConfig
from trace_jax.models.registry import ModelConfig, Params, init_params
from trace_jax.quantization.calibration import calibrate
from trace_jax.quantization.multipliers import Multipliers
from trace_jax.quantization.plan import RECORDED_SITES, UNQUANTIZED, QuantPlan, rollout_plan, trainer_plan
from trace_jax.rollout import Request, Trajectories
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.rollout.embedded.engine import EmbeddedEngine
from trace_jax.rollout.weight_sync import layer_updates
from trace_jax.train.batches import TrainBatch, make_batch
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs

CONFIG = Qwen3MoeConfig(
    vocab_size=97,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=6,
    experts_per_token=2,
    expert_hidden_size=32,
    max_position=128,
)
TIED = replace(CONFIG, tie_embeddings=True)
BIASED = replace(CONFIG, attention_bias=True)
LAYERS = tuple(range(CONFIG.num_layers))
NEVER = (CONFIG.vocab_size + 1,)
"""A stop token that is never drawn."""

PLANS = {
    "bf16": UNQUANTIZED,
    "nvfp4": rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "mxfp4": rollout_plan("mxfp4", "mxfp4", "mxfp4", "mxfp4"),
    "per_token": rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4", per_token=True),
    "fp8": rollout_plan("fp8", "fp8", "fp8", "fp8"),
}
FORWARD_ROWS, FORWARD_LENGTH = 8, 48


def policy(compute_dtype: str = "bfloat16", config: ModelConfig = CONFIG) -> Policy:
    """The policy; its parameters do not depend on the compute dtype."""
    return Policy(config.FAMILY, config, compute_dtype)


@functools.cache
def params(seed: int = 0, config: ModelConfig = CONFIG) -> Params:
    """Float32 masters whose output distribution is far from uniform, with biases that matter."""
    tree = init_params(config.FAMILY, config, jax.random.key(seed))
    tree["embed"]["weight"] = tree["embed"]["weight"] * 20.0
    if not config.tie_embeddings:
        tree["lm_head"]["weight"] = tree["lm_head"]["weight"] * 6.0
    if config == BIASED:
        attention = tree["groups"][0]["attention"]
        for index, name in enumerate(("q_bias", "k_bias", "v_bias", "o_bias")):
            attention[name] = 0.5 * jax.random.normal(jax.random.key(seed + index), attention[name].shape)
    if config.FAMILY != CONFIG.FAMILY:  # biases and sinks of the others are told by being zero
        leaves, structure = jax.tree.flatten(tree)
        noise = [0.3 * jax.random.normal(jax.random.key(1000 + index), leaf.shape) for index, leaf in enumerate(leaves)]
        leaves = [leaf if jnp.any(leaf) else random for leaf, random in zip(leaves, noise, strict=True)]
        tree = jax.tree.unflatten(structure, leaves)
    return tree


@functools.cache
def multipliers(seed: int = 0, config: ModelConfig = CONFIG) -> Multipliers:
    """Static multipliers, the same for both compute dtypes."""
    rng = np.random.default_rng(seed)
    return calibrate(policy(config=config), params(seed, config), rng.integers(0, CONFIG.vocab_size, (8, 32)).tolist(), 1.5)


def engine(
    plan: QuantPlan,
    compute_dtype: str = "bfloat16",
    kind: RecordKind | Literal["none"] = "mantissa",
    max_batch: int | None = 8,
    seed: int | None = 0,
    config: ModelConfig = CONFIG,
) -> EmbeddedEngine:
    """An engine that records every site at every layer, with the weights of `seed` loaded unless it is None."""
    made = EmbeddedEngine(
        policy(compute_dtype, config), plan, CaptureSpec(kind, RECORDED_SITES, tuple(range(config.num_layers))), max_batch
    )
    if seed is not None:
        sync(made, seed)
    return made


def sync(target: EmbeddedEngine, seed: int, version: int = 0) -> Any:
    """Sends the weights of `seed`."""
    config = target._policy.config
    updates = layer_updates(target._policy, target._plan, params(seed, config), multipliers(seed, config))
    return target.update_weights(updates, version)


def requests(count: int = 8, **changes: Any) -> list[Request]:
    """Requests with prompts of 3 to 12 tokens and answers of up to 14."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, CONFIG.vocab_size, size).astype(np.int32) for size in rng.integers(3, 13, 64)]
    made = [Request(i, 100 + i, i // 4, prompts[i], 14, seed=11 * i + 1, stop_token_ids=NEVER) for i in range(count)]
    return [replace(request, **changes) for request in made]


def guided(plan: QuantPlan) -> QuantPlan:
    """The trainer's plan that follows the record at every recorded site."""
    return trainer_plan(plan, "rtn", "guided", "rtn", "guided")


def batch_of(trajectories: Trajectories, length: int = FORWARD_LENGTH) -> TrainBatch:
    """All sequences as one padded batch."""
    bins = [[index] for index in range(trajectories.num_sequences)]
    return make_batch(trajectories, bins, length, FORWARD_ROWS, num_layers=CONFIG.num_layers)[0]


@functools.partial(jax.jit, static_argnames=("spec",))
def _score(masters: Params, scales: Multipliers, batch: TrainBatch, *, spec: ObjectiveSpec) -> tuple[jax.Array, jax.Array, jax.Array]:
    logp, entropy, output = batch_logprobs(masters, scales, batch, spec)
    return logp, entropy, output.own_routes


def score(
    batch: TrainBatch,
    plan: QuantPlan,
    compute_dtype: str = "bfloat16",
    config: ModelConfig = CONFIG,
    masters: Params | None = None,
    scales: Multipliers | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities `[B, T]` of the trainer's forward, and the routes its router would have chosen."""
    spec = ObjectiveSpec(policy(compute_dtype, config), plan)
    logp, _, own = _score(masters or params(0, config), scales or multipliers(0, config), batch, spec=spec)
    return np.asarray(logp), np.asarray(own)


def gap(batch: TrainBatch, logp: np.ndarray) -> np.ndarray:
    """Absolute log-probability difference to the rollout at every sampled token."""
    return np.abs(logp - np.asarray(batch.logp_rollout))[np.asarray(batch.sampled)]


@functools.partial(jax.jit, static_argnames=("plan", "compute_dtype"))
def _captured(masters: Params, scales: Multipliers, batch: TrainBatch, *, plan: QuantPlan, compute_dtype: str) -> dict[str, Any]:
    options = policy(compute_dtype).options(plan, capture=RECORDED_SITES)
    return policy(compute_dtype).forward(masters, replace(batch.inputs(scales), guides=None, routes=None), options).captured


def captured(batch: TrainBatch, plan: QuantPlan, compute_dtype: str) -> dict[str, Any]:
    """Codes and scales of a teacher-forced forward that follows neither record nor routes; leading axes `[L, B, T]`."""
    return jax.device_get(_captured(params(), multipliers(), batch, plan=plan, compute_dtype=compute_dtype))


def with_guides(batch: TrainBatch, change: Any) -> TrainBatch:
    """The batch with every site's guide passed through `change`."""
    assert batch.guides is not None
    return replace(batch, guides=replace(batch.guides, sites={name: change(site) for name, site in batch.guides.sites.items()}))


def assert_same_answers(a: Trajectories, b: Trajectories, tolerance: float = 0.0) -> None:
    """Equal tokens, and log-probabilities within `tolerance`."""
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert np.max(np.abs(a.logprobs - b.logprobs), initial=0.0) <= tolerance


def shifted(x: Any) -> Any:
    """Records moved by one token along the time axis of `[Ls, B, T, ...]`."""
    return None if x is None else jnp.roll(x, 1, axis=2)
