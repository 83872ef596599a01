"""Sections about learning: `algorithm`, `train`, `optimizer`, and the supervised start `sft`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trace_jax.config.section import Beta, Count, Positive, Rate, Section, Split


class CorrectionSection(Section):
    """Importance weight against the train-versus-rollout gap, from rho = pi_old / pi_rollout.

    Args:
      kind: `tis` is min(rho, cap); `mis` is rho, and 0 above the cap; `icepop` is rho, and 0 outside [low, cap]; `none` is 1.
      level: whether rho is the token's, the product over the `sequence`, or its `geometric` mean.
      cap: upper bound of rho.
      low: lower bound, of `icepop` alone; null is its 0.5.
    """

    kind: Literal["none", "tis", "mis", "icepop"] = "tis"
    level: Literal["token", "sequence", "geometric"] = "token"
    cap: Rate = 5.0
    low: Annotated[float, Field(ge=0)] | None = None

    @property
    def lower_bound(self) -> float:
        """`low`, or its default."""
        return 0.5 if self.low is None else self.low


class FilterGroupsSection(Section):
    """Dynamic sampling: groups whose answers all earned the same are replaced by new prompts.

    Args:
      enable: whether to.
      max_num_gen_batches: most batches of `rollout.prompts_per_step` prompts that one step generates; the step then trains on the
        groups that it has.
    """

    enable: bool = False
    max_num_gen_batches: Positive = 10


class OverlongBufferSection(Section):
    """Overlong reward shaping: the reward falls over the last tokens before `rollout.max_new_tokens`.

    Args:
      enable: whether to.
      len: how many tokens; null is a fifth of `rollout.max_new_tokens`, as in DAPO's 4096 of 20480.
      penalty_factor: what an answer at the limit loses.
    """

    enable: bool = False
    len: Positive | None = None
    penalty_factor: Rate = 1.0


class AlgorithmSection(Section):
    """The policy-gradient objective; formulas in docs/method.md.

    Args:
      name: preset of the keys below, as `method` is one of the whole (`trace_jax.config.presets`).
      loss: objective of a token, `ppo_clip` or `cispo`.
      ratio_level: whether the ratio pi / pi_old is the token's or the `geometric` mean over its sequence.
      clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high].
      clip_c: upper bound of the ratio where the advantage is negative; null leaves it free.
      aggregation: `token_mean` divides by the sampled tokens of the whole batch, `seq_mean_token_mean` each sequence by its own and then
        by their number, `seq_mean_token_sum_norm` by the number of sequences times a constant.
      loss_scale_factor: that constant in tokens; null is `rollout.max_new_tokens`.
      normalize_std: whether advantages are divided by the group's standard deviation.
      filter_groups: replacement of groups without a signal.
      overlong_buffer: penalty of answers near the limit.
      correction: weight against the train-versus-rollout gap.
      routing_replay: whether the trainer uses the experts that the rollout chose.
    """

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "trust_band"] = "grpo"
    loss: Literal["ppo_clip", "cispo"] = "ppo_clip"
    ratio_level: Literal["token", "geometric"] = "token"
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    clip_high: Rate = 0.28
    clip_c: Annotated[float, Field(gt=1)] | None = None
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    loss_scale_factor: Positive | None = None
    normalize_std: bool = True
    filter_groups: FilterGroupsSection = FilterGroupsSection()
    overlong_buffer: OverlongBufferSection = OverlongBufferSection()
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
