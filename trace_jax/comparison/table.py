"""The figures of a comparison as texts, for the table on the console and for the page: one method after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from trace_jax.evaluation.mismatch_tables import even_ranges
from trace_jax.terminal import result_console

NONE = "-"
RATE = "pass@1 [95 %]"
LAYERS = 4
"""Layers shown at most; a deeper model is shown in ranges, each by its worst layer."""


def cells(entry: Mapping[str, Any]) -> dict[str, str]:
    """The texts of one entry of `comparison.json`, of a method or of one of its runs, by column; a label may have two lines."""
    gaps, seeds = entry["gaps"], len(entry.get("runs", ()))
    return {
        RATE: _rate(entry["after"], interval=True) + _share(entry["after"], seeds),
        "at\nbf16": _rate(entry["after_bf16"]) + _share(entry["after_bf16"], seeds),
        "KL\nguided": _gap(gaps["guided"], "k3_kl", "{:.1e}") + _share(gaps["guided"], seeds),
        "KL\nunguided": _gap(gaps["unguided"], "k3_kl", "{:.1e}") + _share(gaps["unguided"], seeds),
        "max\ngap": _gap(gaps["unguided"], "logprob_abs_diff_max", "{:.3f}"),
        "equal\ncodes, %": _depth(entry["code_agreement"]),
        "collapse": _collapse(entry),
        "B per\ntoken": f"{sum(entry['bytes_per_token'].values()):.0f}" if entry["bytes_per_token"] else NONE,
        "s rollout/\ntrain/sync": "/".join(
            f"{entry['seconds_per_step'][part]:.2g}" for part in ("rollout", "train", "sync") if part in entry["seconds_per_step"]
        )
        or NONE,
    }


def rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """A row for each method, and below it one for each of its seeds if there are several."""
    for name, entry in figures["methods"].items():
        yield name, cells(entry)
        if len(entry["runs"]) > 1:
            for run in entry["runs"]:
                yield f"  seed {run['seed']}", cells(run)


def table(figures: Mapping[str, Any]) -> Table:
    """The comparison as one table."""
    seeds = figures["seeds"]
    what = f"{figures['task']}, {figures['steps']} steps, {len(seeds)} {'seeds' if len(seeds) > 1 else 'seed'}"
    shown = Table(
        title=Text(f"{what}; {figures['split']} split", "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    shown.add_column("method", no_wrap=True)
    for index, (name, texts) in enumerate(rows(figures)):
        if index == 0:
            for column in texts:
                shown.add_column(column, justify="right", no_wrap=column != "collapse")
        shown.add_row(Text(name), *map(Text, texts.values()), style="dim" if name.startswith("  ") else None)
    return shown


def print_comparison(figures: Mapping[str, Any]) -> None:
    """Prints the table and how to read it."""
    console = result_console()
    console.print(table(figures))
    for line in notes(figures):
        console.print(line, style="dim", highlight=False, markup=False)


def notes(figures: Mapping[str, Any]) -> list[str]:
    """How to read the table, in lines."""
    before = dict.fromkeys(
        f"{entry['rollout']} {_rate(entry['before'], interval=True)}" for entry in figures["methods"].values() if entry["before"]
    )
    windows = dict.fromkeys(entry["window"] for entry in figures["methods"].values())
    worst = ", the worst of each range" if _deep(figures) else ""
    return [
        f"Before RL: {'; '.join(before)}.",
        "pass@1: held-out answers of the rollout at its own precision; at bf16: of the same weights with nothing rounded. The interval "
        "is that of all seeds' answers together; what another seed would have learned is not in it, look at the seeds for that.",
        f"KL (k3, nats per token), and the largest log-prob gap of a step in the unguided forward: {'; '.join(windows)}. A guided "
        "forward replays the rollout's rounding, so its KL is small by construction; a method without guidance has the unguided one only.",
        f"Codes: audited values that trainer and rollout round alike, first to last layer{worst}. Times are seconds of a step. "
        "Over seeds, rates are means and the rest medians.",
    ]


def _deep(figures: Mapping[str, Any]) -> bool:
    return any(len(entry["code_agreement"]) > LAYERS for entry in figures["methods"].values())


def _rate(rate: Mapping[str, float] | None, *, interval: bool = False) -> str:
    if rate is None:
        return NONE
    return f"{rate['pass_at_1']:.3f}" + (f" [{rate['low']:.3f}, {rate['high']:.3f}]" if interval else "")


def _share(figure: Mapping[str, float] | None, seeds: int) -> str:
    """Says where a figure of a method is not that of all its seeds, since some of them gave up."""
    return f" ({figure['seeds']} of {seeds})" if figure and figure.get("seeds", seeds) != seeds else ""


def _gap(gap: Mapping[str, float] | None, figure: str, form: str) -> str:
    return NONE if gap is None else form.format(gap[figure])


def _depth(agreement: Mapping[str, float]) -> str:
    shares = list(agreement.values())
    if not shares:
        return NONE
    return " ".join(f"{100 * min(shares[low:high]):.0f}" for low, high in even_ranges(len(shares), LAYERS))


def _collapse(entry: Mapping[str, Any]) -> str:
    if "runs" not in entry:
        found = entry["collapse"]
        return NONE if found is None else f"{found['step']} ({found['reason']})"
    found = entry["collapses"]
    if not found:
        return NONE
    steps = ", ".join(f"{one['step']} ({one['reason']})" for one in found)
    return steps if len(entry["runs"]) == 1 else f"{len(found)} of {len(entry['runs'])}: {steps}"
