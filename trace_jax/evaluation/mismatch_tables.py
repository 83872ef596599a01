"""The mismatch report as tables a person reads, and the answer in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from trace_jax.terminal import result_console

POSITION_COLUMNS, LAYER_COLUMNS = 8, 4
"""Columns at most; longer answers and deeper models are shown in ranges."""

STYLES = {"small": "bold green", "risky": "bold yellow", "large": "bold red"}


def print_mismatch(report: Mapping[str, Any]) -> None:
    """Prints the figures as a whole, per answer position and per layer, and at the end, where a terminal stays, the answer."""
    console = result_console()
    console.print(_summary(report))
    console.print(
        "gap: |log p(trainer) - log p(rollout)| of each sampled token, in nats, measured with the compiled program that trains.\n"
        "exp|gap|: mean factor between the two probabilities of a token; 1 is perfect. Same routing: tokens and layers for which\n"
        "the trainer's own router would have chosen the rollout's experts. Trainers: naive does not round, qat rounds by itself\n"
        "(qat_w4a16 the weights alone), trace* follow the rollout's record, so their gap is small partly by construction.\n"
        "One apart: of the values that rounding to nearest under the rollout's scale sends to another code, those sent to a\n"
        "neighbour; the lowest of the layers.",
        style="dim",
    )
    console.print(_positions(report))
    for precision, entry in report["precisions"].items():
        layers = _layers(precision, entry["methods"])
        if layers is not None:
            console.print(layers)
    for line in (*_compensated(report), *report["not_executed"].values(), *answers(report)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def answers(report: Mapping[str, Any]) -> list[str]:
    """The rules, then per precision below BF16 whether the model can move there, and with which method."""
    limits = report["limits"]["token_mult_prob_error"]
    rules = (
        f"Gap by exp|gap|: small up to {limits['small']}, risky up to {limits['risky']}, large above. "
        "A pass@1 whose 95 % interval lies below bf16's is a loss, whatever the gap."
    )
    return [rules, *(entry["answer"] for precision, entry in report["precisions"].items() if precision != "bf16")]


def _compensated(report: Mapping[str, Any]) -> list[str]:
    """A line for each precision whose rollout was compensated."""
    shares = {precision: entry["residual_fraction"] for precision, entry in report["precisions"].items()}
    return [f"{name}: residual of {100 * share:g} % of the experts' input channels compensated." for name, share in shares.items() if share]


def _summary(report: Mapping[str, Any]) -> Table:
    answered = report["cache"] or f"{report['split']} split, answers by engine {report['engine']}"
    table = _table(f"Is it safe to move {report['policy']} to FP4? ({report['task']}, {answered})")
    for name in ("rollout", "pass@1 [95 %]", "trainer"):
        table.add_column(name, no_wrap=True)
    for name in ("KL (k3)", "mean gap", "largest", "exp|gap|", "same routing", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for precision, entry in report["precisions"].items():
        rate = f"{entry['pass_at_1']:.3f} [{entry['pass_at_1_low']:.3f}, {entry['pass_at_1_high']:.3f}]"
        for index, (method, result) in enumerate(entry["methods"].items()):
            metrics = result["metrics"]
            routing = metrics.get("router/agreement")
            table.add_row(
                precision if index == 0 else "",
                Text(rate if index == 0 else ""),
                method,
                f"{metrics['rollout_corr/k3_kl']:.1e}",
                f"{metrics['train_rollout_logprob_abs_diff']:.4f}",
                f"{metrics['train_rollout_logprob_abs_diff_max']:.3f}",
                f"{metrics['token_mult_prob_error']:.4f}",
                "-" if routing is None else f"{routing:.1%}",
                Text(result["gap"], STYLES[result["gap"]]),
            )
        table.add_section()
    return table


def _positions(report: Mapping[str, Any]) -> Table:
    table = _table("Mean gap (nats) by token of the answer, the first is 1: does it grow?")
    longest = max(len(result["positions"]) for entry in report["precisions"].values() for result in entry["methods"].values())
    ranges = even_ranges(longest, POSITION_COLUMNS)
    table.add_column("rollout", no_wrap=True)
    table.add_column("trainer", no_wrap=True)
    for low, high in ranges:
        table.add_column(_span(low + 1, high), justify="right", no_wrap=True)
    for precision, entry in report["precisions"].items():
        for index, (method, result) in enumerate(entry["methods"].items()):
            cells = []
            for low, high in ranges:
                values = [value for value in result["positions"][low:high] if value == value]
                cells.append(f"{sum(values) / len(values):.4f}" if values else "-")
            table.add_row(precision if index == 0 else "", method, *cells)
        table.add_section()
    return table


def _layers(precision: str, methods: Mapping[str, Any]) -> Table | None:
    layers = sorted({int(layer) for result in methods.values() for site in result["sites"].values() for layer in site})
    if not layers:
        return None
    ranges = [layers[low:high] for low, high in even_ranges(len(layers), LAYER_COLUMNS)]
    worst = ", worst layer of the range" if len(ranges) < len(layers) else ""
    table = _table(f"{precision}: share of values rounded alike in trainer and rollout (distance D_act, 0 is equal) by layer{worst}")
    table.add_column("trainer", no_wrap=True)
    table.add_column("site", no_wrap=True)
    for group in ranges:
        table.add_column(f"layer {_span(group[0], group[-1])}", justify="right", no_wrap=True)
    table.add_column("one apart", justify="right", no_wrap=True)
    for method, result in methods.items():
        for index, (site, by_layer) in enumerate(result["sites"].items()):
            cells = (_agreement(by_layer, group) for group in ranges)
            table.add_row(method if index == 0 else "", site, *cells, _one_apart(by_layer))
        table.add_section()
    return table


def _agreement(by_layer: Mapping[str, Any], layers: Sequence[int]) -> str:
    found = [by_layer[str(layer)] for layer in layers if str(layer) in by_layer]
    if not found:
        return "-"
    return f"{min(one['code_agreement'] for one in found):.1%} ({max(one['d_act'] for one in found):.3f})"


def _one_apart(by_layer: Mapping[str, Any]) -> str:
    """The lowest share of a layer."""
    shares = [one["adjacent_share"] for one in by_layer.values() if one["adjacent_share"] == one["adjacent_share"]]
    return f"{min(shares):.1%}" if shares else "-"


def _table(title: str) -> Table:
    return Table(title=Text(title, "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def even_ranges(length: int, most: int) -> list[tuple[int, int]]:
    """At most `most` ranges of about equal size."""
    count = min(length, most)
    edges = [round(i * length / count) for i in range(count + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
