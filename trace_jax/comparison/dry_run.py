"""`trace-jax compare --dry-run`: which runs a comparison consists of, and what each needs."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from trace_jax.comparison.plan import Comparison
from trace_jax.config.keys import leaves
from trace_jax.terminal import Announce, result_console, unannounced
from trace_jax.train.dry_run import memory_text, plan_run


def plan_runs(comparison: Comparison, announce: Announce = unannounced) -> dict[str, Any]:
    """Checks what the start of every run checks.

    Returns:
      `seeds`, `runs` (names of their folders), `steps` of all of them together, and per method the resolved `config` and the `memory` plan.
    """
    methods = {}
    for index, (name, config) in enumerate(comparison.variants.items()):
        announce(f"checking {name}", index, len(comparison.variants))
        methods[name] = plan_run(config)
    runs = comparison.runs()
    return {
        "seeds": list(comparison.seeds),
        "runs": [run.name for run in runs],
        "steps": len(runs) * comparison.base.steps,
        "start": comparison.base.model.source or f"cold start of at most {comparison.base.sft.steps} steps",
        "methods": methods,
    }


def print_runs(plan: dict[str, Any]) -> None:
    """A table of the methods, by what differs between them, and the size of the whole."""
    settings = {name: dict(leaves(method["config"])) for name, method in plan["methods"].items()}
    keys = dict.fromkeys(key for values in settings.values() for key in values)
    differing = [key for key in keys if len({str(values.get(key)) for values in settings.values()}) > 1]
    shown = Table(
        title=Text("Methods, by the keys in which they differ", "bold"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    shown.add_column("", no_wrap=True)
    for name in settings:
        shown.add_column(name, justify="right")
    for key in differing:
        shown.add_row(key, *(Text(str(values.get(key, "not set"))) for values in settings.values()))
    for key in next(iter(plan["methods"].values()))["memory"]:
        shown.add_row(key, *(memory_text(key, method["memory"][key]) for method in plan["methods"].values()))
    console = result_console()
    console.print(shown)
    console.print(
        f"{len(plan['runs'])} runs, {plan['steps']:,} steps in all, seeds {', '.join(map(str, plan['seeds']))}; start: {plan['start']}"
    )
