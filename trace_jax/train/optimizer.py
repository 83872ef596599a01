"""The optimizer chain, built from its config."""

from __future__ import annotations

import functools

import optax

from trace_jax.config.schema import OptimizerConfig


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Linear warm-up, first rate `learning_rate / warmup_steps`, over `warmup_steps` updates; then constant, or in a line to zero."""
    rate, warmup = config.learning_rate, config.warmup_steps
    after = optax.constant_schedule(rate) if config.decay_steps is None else optax.linear_schedule(rate, 0.0, config.decay_steps - warmup)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(rate / warmup, rate, max(1, warmup - 1)), after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Global-norm clipping, then Adam or AdamW on float32 masters.

    Weight decay acts on matrices only: norms and biases are vectors per layer and stay undecayed. Equal configs get the same object,
    which is part of the key of compiled programs: the runs of one process share these.
    """
    return _make(config)  # pyright: ignore[reportArgumentType]  # a frozen model has a hash


@functools.cache
def _make(config: OptimizerConfig) -> optax.GradientTransformation:
    schedule = learning_rate_schedule(config)
    inner = (
        optax.adam(schedule, config.b1, config.b2, config.eps)
        if config.name == "adam"
        else optax.adamw(schedule, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=_decayed)
    )
    return optax.chain(optax.clip_by_global_norm(config.grad_clip), inner) if config.grad_clip > 0 else inner


def _decayed(params: dict) -> dict:
    """True for matrices; stacked layer vectors have two axes, so the layer axis is not counted."""

    def mark(tree: dict, stacked: bool) -> dict:
        return {
            key: mark(value, stacked or key == "groups") if isinstance(value, dict) else value.ndim - int(stacked) >= 2
            for key, value in tree.items()
        }

    return mark(params, False)
