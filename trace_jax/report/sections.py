"""What the report shows, in order: each panel with its question, its source and how to read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trace_jax.report import bars, plots
from trace_jax.report.plots import Line
from trace_jax.report.series import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Panel:
    """One figure of the report.

    Args:
        title: stands above it.
        caption: what it shows and how to read it; stands below.
        draw: draws the runs.
        wide: takes the whole width of the page.
        bars: one bar a run, so its height grows with the number of runs and its legend needs no room of its own.
        overview: what it shows, in a few words, if it is part of the PNG; empty leaves it out there.
    """

    title: str
    caption: str
    draw: Callable[["Axes", Sequence[Run]], None]
    wide: bool = False
    bars: bool = False
    overview: str = ""


@dataclass(frozen=True)
class Section:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


def _lines(*lines: Line, unit: str, log: bool = False) -> Callable[["Axes", Sequence[Run]], None]:
    return partial(plots.draw_lines, lines=lines, unit=unit, log=log)


def _shares(*lines: Line, unit: str) -> Callable[["Axes", Sequence[Run]], None]:
    return partial(plots.draw_lines, lines=lines, unit=unit, share=True)


SECTIONS: tuple[Section, ...] = (
    Section(
        "Reward",
        (
            Panel(
                "Reward at rollout precision",
                "Line: mean reward of the training prompts of each step. Points: the held-out split, with its confidence interval where "
                "it was recorded; the first point is before training. This is the figure that says whether training worked.",
                plots.draw_reward,
                wide=True,
                overview="did training work? held-out points with their 95 % interval",
            ),
            Panel(
                "Groups without a learning signal",
                "Share of prompts whose answers all got the same reward: their advantage is exactly zero.",
                _shares(Line("frac_reward_zero_std", "groups"), unit="share of groups"),
            ),
            Panel(
                "Policy entropy",
                "Mean entropy (nats) of the sampling distribution on sampled tokens.",
                _lines(Line("policy/entropy", "entropy"), unit="nats per token"),
            ),
        ),
    ),
    Section(
        "Train-versus-rollout mismatch",
        (
            Panel(
                "KL of rollout and trainer",
                "K3 estimate of KL(rollout || trainer) on sampled tokens, log scale. The guided forward replays the rollout's rounding, so "
                "its KL is low partly by construction; read it together with the unguided forward and the reward.",
                partial(plots.draw_lines, lines=plots.mismatch_lines, unit="nats per token, log scale", log=True),
                wide=True,
                overview="how far the two drift apart, with and without the record",
            ),
            Panel(
                "Log-prob gap",
                "|log p of the trainer - log p of the rollout| on sampled tokens: mean and largest, guided unless it says otherwise.",
                _lines(*plots.GAP_LINES, unit="nats, log scale", log=True),
            ),
            Panel(
                "Weights above the cap",
                "Share of tokens whose importance weight pi_old / pi_rollout is above the cap and therefore truncated.",
                _shares(Line("rollout_corr/rollout_is_ratio_fraction_high", "tokens"), unit="share of tokens"),
            ),
            Panel(
                "Router agreement",
                "Share of (token, layer) pairs for which the trainer's own router would have chosen the rollout's experts.",
                _shares(Line("router/agreement", "agreement"), unit="share of pairs"),
            ),
            Panel(
                "Staleness",
                "Trainer version minus the version of the weights that sampled the tokens, in optimizer updates.",
                _lines(Line("sync/staleness", "updates", smooth=False), unit="optimizer updates"),
            ),
        ),
    ),
    Section(
        "Guidance",
        (
            Panel(
                "Size of the record",
                "Bytes per token that the rollout hands to the trainer, by site; parts below half a percent are not drawn.",
                bars.draw_bytes,
                wide=True,
                bars=True,
                overview="what the rollout hands to the trainer, by site",
            ),
            Panel(
                "Parity agreement",
                "Share of values whose own rounding, under the rollout's scale, has the recorded bit.",
                _shares(Line("guidance/parity_agreement", "agreement"), unit="share of values"),
            ),
            Panel(
                "Saturated, missing, recomputed",
                "Shares of values and of tokens; all should stay near zero.",
                _shares(*plots.SHARE_LINES, unit="share"),
            ),
            Panel(
                "Audited code agreement",
                "Share of FP4 codes that trainer and rollout have in common, from sequences captured with full codes; newest audit.",
                partial(plots.draw_audit, what="code_agreement", unit="share of values"),
                overview="values that both round to the same FP4 code, by layer",
            ),
            Panel(
                "Adjacent share",
                "Among differing codes, the share that is one codebook entry apart; newest audit.",
                partial(plots.draw_audit, what="adjacent_share", unit="share of differing codes"),
            ),
            Panel(
                "Outside the bracket",
                "Share of rollout codes that are neither of the two neighbours of the trainer's value; grows with staleness; newest audit.",
                partial(plots.draw_audit, what="outside_bracket_fraction", unit="share of codes"),
            ),
            Panel(
                "Activation distance",
                "D_act relative to the rollout: norm of the difference of the quantized activations over the rollout's norm; newest audit. "
                "A layer where both are equal has no point.",
                partial(plots.draw_audit, what="d_act", unit="relative distance, log scale", log=True),
            ),
        ),
    ),
    Section(
        "Responses",
        (
            Panel(
                "Answer length",
                "Mean number of sampled tokens.",
                _lines(Line("response/length_mean", "tokens"), unit="tokens per answer"),
                overview="sampled tokens, mean of a step",
            ),
            Panel(
                "Truncated answers",
                "Share of answers cut at the token limit.",
                _shares(Line("response/truncated_fraction", "answers"), unit="share of answers"),
            ),
        ),
    ),
    Section(
        "Optimisation",
        (
            Panel(
                "Loss",
                "Clipped policy loss, mean over the tokens of the batch; it does not measure progress.",
                _lines(Line("loss", "loss"), unit="loss"),
            ),
            Panel("Gradient norm", "Global norm before clipping.", _lines(Line("grad_norm", "norm"), unit="norm")),
            Panel(
                "Clip fraction",
                "Share of tokens without a gradient because the ratio is clipped.",
                _shares(Line("policy/clip_fraction", "tokens"), unit="share of tokens"),
            ),
            Panel(
                "Learning rate",
                "What the schedule gave the optimizer in this step.",
                _lines(Line("learning_rate", "learning rate", smooth=False), unit="learning rate"),
            ),
        ),
    ),
    Section(
        "Time",
        (
            Panel(
                "Time per step",
                "Median over the steps of each part; parts below half a percent are not drawn.",
                bars.draw_time,
                wide=True,
                bars=True,
                overview="where the time of a step goes",
            ),
            Panel(
                "Rollout throughput",
                "Sampled tokens per second of rollout.",
                _lines(Line("throughput/rollout_tokens_per_s", "tokens"), unit="tokens per second"),
            ),
            Panel(
                "Training throughput",
                "Tokens per second of training.",
                _lines(Line("throughput/train_tokens_per_s", "tokens"), unit="tokens per second"),
            ),
        ),
    ),
)
