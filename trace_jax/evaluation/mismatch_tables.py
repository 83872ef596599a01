"""The mismatch report as tables a person reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from trace_jax.cli.common import result_console

GUIDED = ("trace_scales", "trace", "trace_full")


def print_mismatch(report: Mapping[str, Any]) -> None:
    """Prints the answer, then the figures as a whole, per answer position, and per layer."""
    console = result_console()
    console.print(_summary(report))
    console.print(
        "gap = |log p(train) - log p(rollout)| on sampled tokens, from the training objective's own compiled forward. Guided\n"
        "methods (trace*) replay the rollout's rounding, so read them beside the pass rate at that precision and beside qat.",
        style="dim",
    )
    console.print(_positions(report))
    for precision, entry in report["precisions"].items():
        layers = _layers(precision, entry["methods"])
        if layers is not None:
            console.print(layers)
    for line in answers(report):
        console.print(line)


def answers(report: Mapping[str, Any]) -> list[str]:
    """One sentence per precision below BF16: is it safe, and with which method of the trainer."""
    lines = []
    for precision, entry in report["precisions"].items():
        if precision == "bf16":
            continue
        safe = [name for name, result in entry["methods"].items() if result["verdict"] == "safe"]
        unguided = [name for name in safe if name not in GUIDED]
        if unguided:
            lines.append(f"{precision}: safe already with {', '.join(unguided)}.")
        elif safe:
            lines.append(f"{precision}: safe with guidance ({', '.join(safe)}); without it the gap is too wide.")
        else:
            lines.append(f"{precision}: not safe with any method measured here.")
    return lines


def _summary(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"Is it safe to move {report['policy']} to FP4? ({report['task']}, {report['split']})", title_justify="left")
    for name in ("precision", "pass@1 [95 %]", "trainer"):
        table.add_column(name)
    for name in ("KL (k3)", "mean gap", "max gap", "exp|gap|", "own routing", "verdict"):
        table.add_column(name, justify="right")
    for precision, entry in report["precisions"].items():
        rate = f"{entry['pass_at_1']:.3f} [{entry['pass_at_1_low']:.3f}, {entry['pass_at_1_high']:.3f}]"
        for index, (method, result) in enumerate(entry["methods"].items()):
            metrics = result["metrics"]
            table.add_row(
                precision if index == 0 else "",
                rate if index == 0 else "",
                method,
                f"{metrics['rollout_corr/k3_kl']:.2e}",
                f"{metrics['train_rollout_logprob_abs_diff']:.4f}",
                f"{metrics['train_rollout_logprob_abs_diff_max']:.3f}",
                f"{metrics['token_mult_prob_error']:.4f}",
                f"{metrics.get('router/agreement', float('nan')):.3f}",
                result["verdict"],
            )
        table.add_section()
    return table


def _positions(report: Mapping[str, Any]) -> Table:
    table = Table(title="Mean gap by token of the answer", title_justify="left")
    longest = max(len(result["positions"]) for entry in report["precisions"].values() for result in entry["methods"].values())
    bins = _bins(longest)
    table.add_column("precision")
    table.add_column("trainer")
    for low, high in bins:
        table.add_column(str(low) if high == low + 1 else f"{low}-{high - 1}", justify="right")
    for precision, entry in report["precisions"].items():
        for method, result in entry["methods"].items():
            cells = []
            for low, high in bins:
                values = [value for value in result["positions"][low:high] if value == value]
                cells.append(f"{sum(values) / len(values):.4f}" if values else "-")
            table.add_row(precision, method, *cells)
        table.add_section()
    return table


def _layers(precision: str, methods: Mapping[str, Any]) -> Table | None:
    if not any(result["sites"] for result in methods.values()):
        return None
    table = Table(title=f"{precision}: values equal in trainer and rollout (D_act, relative) by layer", title_justify="left")
    table.add_column("trainer")
    table.add_column("site")
    layers = sorted({int(layer) for result in methods.values() for site in result["sites"].values() for layer in site})
    for layer in layers:
        table.add_column(f"layer {layer}", justify="right")
    for method, result in methods.items():
        for site, by_layer in result["sites"].items():
            cells = [f"{by_layer[str(i)]['code_agreement']:.3f} ({by_layer[str(i)]['d_act']:.3f})" for i in layers]
            table.add_row(method, site, *cells)
        table.add_section()
    return table


def _bins(length: int, most: int = 8) -> list[tuple[int, int]]:
    if length <= most:
        return [(i, i + 1) for i in range(length)]
    edges = [round(i * length / most) for i in range(most + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))
