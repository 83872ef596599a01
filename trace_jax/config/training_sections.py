"""Sections about learning: `algorithm`, `train`, `optimizer`, and the supervised start `sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trace_jax.config.section import Beta, Count, Positive, Rate, Section, Split


class CorrectionSection(Section):
    """Importance weight between the rollout's and the trainer's old policy: `tis` is min(pi_old / pi_rollout, cap)."""

    kind: Literal["tis", "none"] = "tis"
    level: Literal["token"] = "token"
    cap: Rate = 5.0


class AlgorithmSection(Section):
    """The policy-gradient objective.

    Args:
      clip_low, clip_high: the ratio pi / pi_old is clipped to [1 - clip_low, 1 + clip_high].
      aggregation: `token_mean` divides by the sampled tokens of the whole batch.
      normalize_std: whether advantages are divided by the group's standard deviation.
      correction: weight against the train-versus-rollout gap.
      routing_replay: whether the trainer uses the experts that the rollout chose.
    """

    name: Literal["grpo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Rate = 0.28
    aggregation: Literal["token_mean"] = "token_mean"
    normalize_std: bool = True
    correction: CorrectionSection = CorrectionSection()
    routing_replay: bool = True


class TrainSection(Section):
    """How a batch becomes updates.

    Args:
      micro_batch_tokens: tokens, padding included, of one forward and backward pass; short sequences share a row.
      updates_per_batch: optimizer updates per generated batch; its prompts are split among them.
      unguided_every: steps between measurements of an unguided forward pass beside the guided one; 0 is never.
      old_logprobs: `recompute` takes old log-probs from the trainer's own forward pass before the updates.
      remat: whether layer activations are recomputed in the backward pass, to save memory.
    """

    micro_batch_tokens: Positive = 4096
    updates_per_batch: Positive = 1
    unguided_every: Count = 10
    old_logprobs: Literal["recompute"] = "recompute"
    remat: bool = True


class OptimizerConfig(Section):
    """Optax chain: global-norm clipping (0: none), then Adam or AdamW with a linear warm-up.

    Args:
      warmup_steps: updates until the rate is `learning_rate`.
      decay_steps: updates, warm-up included, after which the rate has fallen in a line to zero; null keeps it constant.
    """

    name: Literal["adamw", "adam"] = "adamw"
    learning_rate: Rate = 1.0e-6
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(ge=0)] = 1.0
    warmup_steps: Count = 0
    decay_steps: Positive | None = None
    b1: Beta = 0.9
    b2: Beta = 0.999
    eps: Rate = 1.0e-8


class SftSection(Section):
    """The supervised cold start.

    Args:
      steps: updates, at most.
      batch_size: worked answers per update.
      learning_rate, warmup_steps: of its AdamW.
      eval_every: updates between checks of the stop rule; 0 is never.
      stop_pass_rate: stop when this share of `split_for_stop` is solved; null trains all `steps`.
      split_for_stop: another split than the one results are reported on, so that stopping does not bias them.
      max_prompts: prompts of that split used for a check; null is all of them.
    """

    steps: Positive = 200
    batch_size: Positive = 128
    learning_rate: Rate = 3.0e-3
    warmup_steps: Count = 20
    eval_every: Count = 10
    stop_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    split_for_stop: Split = "test"
    max_prompts: Positive | None = None
