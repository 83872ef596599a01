"""The pictures of the study: what the methods earned and how far trainer and rollout were apart, over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_jax.report.html import png_bytes
from trace_jax.report.style import COLORS, heading, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def training_figure(curves: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Reward and KL by step, a PNG.

    Args:
      curves: of curves.json: method -> metric -> one series a seed.
    """
    with styled():
        figure = new_figure(11.0, 8.0)
        panels = (
            ("reward/mean", "Reward", "of the sampled answers, at rollout precision; mean of the seeds and their range", False),
            ("eval/validation/pass_at_1", "Held-out pass rate", "at rollout precision", False),
            ("rollout_corr/k3_kl", "KL of rollout and trainer", "the forward that trains; log scale", True),
            ("unguided/rollout_corr/k3_kl", "The same without guidance", "methods with a record; log scale", True),
        )
        for axes, (metric, title, note, log) in zip(figure.subplots(2, 2).ravel(), panels, strict=True):
            heading(axes, title, note)
            for color, (method, metrics) in zip(COLORS, curves.items(), strict=False):
                if metric in metrics:
                    _draw_seeds(axes, metrics[metric], color, method)
            if log:
                axes.set_yscale("log")
            axes.set_xlabel("step")
            if axes.lines:
                axes.legend(loc="best")
        return png_bytes(figure)


def lines_figure(title: str, note: str, xlabel: str, lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> bytes:
    """Named curves (x, y) on a logarithmic y axis, a PNG."""
    with styled():
        figure = new_figure(8.0, 4.2)
        axes = figure.subplots()
        heading(axes, title, note)
        for color, (name, (x, y)) in zip(COLORS, lines.items(), strict=False):
            axes.plot(x, y, color=color, label=name)
        axes.set_yscale("log")
        axes.set_xlabel(xlabel)
        axes.legend(loc="best")
        return png_bytes(figure)


def _draw_seeds(axes: Axes, seeds: Sequence[Mapping[str, Any]], color: str, label: str) -> None:
    """Mean of the seeds at the steps that all have, and the range from the lowest to the highest."""
    by_step = [dict(zip(series["steps"], series["values"], strict=True)) for series in seeds]
    steps = sorted(set.intersection(*map(set, by_step)))
    values = np.array([[series[step] for step in steps] for series in by_step])
    axes.plot(steps, values.mean(0), color=color, label=label)
    axes.fill_between(steps, values.min(0), values.max(0), color=color, alpha=0.12, linewidth=0)
