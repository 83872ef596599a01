"""The tables and pictures of docs/study.md, each from the logs in docs/study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, TypeAlias

from trace_jax.comparison.table import rows
from trace_jax.markdown import markdown_table
from trace_jax.study.figures import lines_figure, training_figure

Logs: TypeAlias = Mapping[str, Any]

NOT_MEASURED = "Not measured yet.\n"

WINDOW = 50
"""Steps at the start and at the end that the table of the training averages over."""

POSITIONS = ((0, 8), (8, 32), (32, 64), (64, 96), (96, 128), (128, 192))
"""Ranges of token indices in the answer."""


def methods_table(logs: Logs) -> str:
    """What each method reached, and each of its seeds."""
    shown = [(name.strip(), texts) for name, texts in rows(logs["comparison"])]
    headings = ["method", *(" ".join(column.split()) for column in shown[0][1])]
    return markdown_table(headings, [[name, *texts.values()] for name, texts in shown], ("method", "collapse"))


def _gaps_table(variants: Mapping[str, Any], names: Sequence[str]) -> str:
    headings = ("variant", "pass@1", "KL (k3)", "mean gap", "largest gap", "equal codes, %", "one apart, %")
    lines = []
    for name in names:
        entry = variants[name]
        metrics = entry["metrics"]
        lines.append(
            [
                name,
                f"{entry['pass_at_1']:.3f}",
                f"{metrics['rollout_corr/k3_kl']:.1e}",
                f"{metrics['train_rollout_logprob_abs_diff']:.1e}",
                f"{metrics['train_rollout_logprob_abs_diff_max']:.2f}",
                *(_percent(entry["sites"], figure) for figure in ("code_agreement", "adjacent_share")),
            ]
        )
    return markdown_table(headings, lines, ("variant",))


def _percent(sites: Mapping[str, Mapping[str, Mapping[str, float | None]]], figure: str) -> str:
    """Median over layers and sites, and the lowest."""
    values = [100 * value for site in sites.values() for layer in site.values() if (value := layer[figure]) is not None]
    return f"{median(values):.2f} ({min(values):.2f})" if values else "-"


def layers_table(logs: Logs) -> str:
    """Layers guided, with one bit a value, and bits kept."""
    names = [name for name in logs["gaps"]["variants"] if not name.startswith("kv16")]
    return _gaps_table(logs["gaps"]["variants"], names)


def cache_table(logs: Logs) -> str:
    """The gap by place in the answer, with the cache in FP4 and in BF16."""
    headings = ["trainer", "cache", *(f"{low} to {high - 1}" for low, high in POSITIONS)]
    lines = []
    for prefix, cache in (("", "NVFP4"), ("kv16_", "BF16")):
        for trainer in ("unrounded", "none", "last_4"):
            places = logs["gaps"]["variants"][prefix + trainer]["positions"]
            parts = (places[low:high] for low, high in POSITIONS)
            lines.append([trainer, cache, *(f"{sum(part) / len(part):.1e}" if part else "-" for part in parts)])
    return markdown_table(headings, lines, ("trainer", "cache"))


def depth_table(logs: Logs) -> str:
    """Share of the rounding differences that are one code apart, by layer, of two trainers."""
    lines = []
    for trainer in ("unrounded", "none", "last_4"):
        for site, layers in logs["gaps"]["variants"][trainer]["sites"].items():
            shares = (figures["adjacent_share"] for figures in layers.values())
            lines.append([trainer, site, *("-" if share is None else f"{100 * share:.2f}" for share in shares)])
    return markdown_table(["trainer", "site", *(f"layer {layer}" for layer in layers)], lines, ("trainer", "site"))


def channels_table(logs: Logs) -> str:
    """QUADS: the gap against the share of channels compensated."""
    return _gaps_table(logs["channels"]["variants"], list(logs["channels"]["variants"]))


def versions_table(logs: Logs) -> str:
    """Rounding by the age of the record: medians over audits, layers and sites."""
    headings = ("updates old", "equal codes, %", "one apart, %", "outside of the two neighbours, %")
    figures = ("code_agreement", "adjacent_share", "outside_bracket_fraction")
    lines = [[age, *(f"{100 * entry[figure]:.3f}" for figure in figures)] for age, entry in logs["versions"].items()]
    return markdown_table(headings, lines, ())


def posthoc_table(logs: Logs) -> str:
    """Policies trained in BF16 and in FP4, rolled out at each precision."""
    found = [entry for name, entry in logs.items() if name.startswith("eval-")]
    if not found:
        return NOT_MEASURED
    lines = [
        [one["policy"].rpartition("/")[2], one["precision"], f"{one['pass_at_1']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"]
        for one in found
    ]
    return markdown_table(("policy", "rolled out in", "pass@1 [95 %]"), lines, ("policy", "rolled out in"))


def training_table(logs: Logs) -> str:
    """First and last steps of every run, the last being those that all runs reached; a dash where a run recorded nothing."""
    found = logs["curves"]
    last = min(series["steps"][-1] for metrics in found.values() for series in metrics["reward/mean"])
    windows = ((1, min(WINDOW, last)), (max(1, last - WINDOW + 1), last))
    headings = ["method", "seed"]
    headings += [f"{what}, steps {low} to {high}" for what in ("reward", "solved") for low, high in windows]
    headings += [f"KL (k3), {what}, steps {windows[1][0]} to {last}" for what in ("training forward", "unguided")]
    lines = []
    for method, metrics in found.items():
        for seed in (series["seed"] for series in metrics["reward/mean"]):
            own = {name: series for name, seeds in metrics.items() for series in seeds if series["seed"] == seed}
            cells = [_window(own.get(name), *window, "{:.3f}") for name in ("reward/mean", "reward/pass_rate") for window in windows]
            cells += [_window(own.get(name), *windows[1], "{:.1e}") for name in ("rollout_corr/k3_kl", "unguided/rollout_corr/k3_kl")]
            lines.append([method, str(seed), *cells])
    return markdown_table(headings, lines, ("method",))


def _window(series: Mapping[str, Any] | None, low: int, high: int, form: str) -> str:
    values = [] if series is None else [value for step, value in zip(series["steps"], series["values"], strict=True) if low <= step <= high]
    return form.format(fmean(values)) if values else "-"


def _when_measured(log: str, table: Callable[[Logs], str]) -> Callable[[Logs], str]:
    return lambda logs: table(logs) if log in logs else NOT_MEASURED


PAGE_PARTS: dict[str, Callable[[Logs], str]] = {
    "training": training_table,
    "methods": _when_measured("comparison", methods_table),
    "layers": _when_measured("gaps", layers_table),
    "depth": _when_measured("gaps", depth_table),
    "versions": _when_measured("versions", versions_table),
    "positions": _when_measured("gaps", cache_table),
    "channels": _when_measured("channels", channels_table),
    "posthoc": posthoc_table,
}
"""Name of a block of the page -> its table."""


def pictures(logs: Logs) -> dict[str, bytes]:
    """Name -> PNG, of what is measured."""
    drawn = {"training": training_figure(logs["curves"])}
    if "gaps" in logs:
        variants = logs["gaps"]["variants"]
        lines = {name: _smooth(variants[name]["positions"]) for name in ("unrounded", "none", "last_4", "kv16_unrounded", "kv16_none")}
        note = "mean |log p(trainer) - log p(rollout)| of nine tokens"
        drawn["positions"] = lines_figure("The gap along the answer", note, "token", lines)
    return drawn


def _smooth(values: Sequence[float]) -> tuple[list[int], list[float]]:
    places = range(len(values))
    return list(places), [fmean(values[max(0, at - 4) : at + 5]) for at in places]
