"""`trace-jax bench`: times of the kernels and of a training step on this machine, against its limits and their peers."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from trace_jax.cli.arguments import Json
from trace_jax.cli.common import run_and_show, to_json
from trace_jax.cli.progress import Display
from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.terminal import result_console

RESULTS = Path("benchmarks/results")
DOCUMENT = Path("docs/performance.md")


def bench(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="OP", help="Operations; all kernels by default. training_step is a whole step.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Small shapes: seconds instead of minutes.")] = False,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Decoder layers of training_step.")] = 2,
    out: Annotated[str | None, typer.Option("--out", metavar="NAME", help="Write the rows to benchmarks/results/NAME.json.")] = None,
    render: Annotated[
        str | None,
        typer.Option(
            "--render",
            metavar="NAME",
            help="Time nothing; bring the table of benchmarks/results/NAME.json in docs/performance.md up to date.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Time the kernels, and compare with the machine's limits where they are known."""
    if render is not None:
        if ops or small or out is not None:
            raise UserError("--render times nothing; leave out the operations, --small and --out")
        run_and_show(lambda _: _render(render), lambda result: print(f"{result['document']}: {result['rows']} rows"), json=json)
        return
    path = None if out is None else _result_path(out)

    def work(display: Display) -> dict[str, Any]:
        rows = _measure(ops, small, layers, display)
        if path is not None:
            _write(path, rows)
        return {"rows": rows}

    run_and_show(work, lambda result: _print(result["rows"]), json=json)


def _measure(ops: Sequence[str] | None, small: bool, layers: int, display: Display) -> list[dict[str, Any]]:
    from pallas_kernels import benchmark
    from trace_jax.benchmark import training_step

    known = (*benchmark.OPS, training_step.OP)
    chosen = ops or benchmark.OPS
    unknown = sorted(set(chosen) - set(known))
    if unknown:
        raise UserError(f"unknown op {', '.join(unknown)}; write one of {', '.join(known)}")
    # First, while nothing else has raised the device's peak of memory.
    rows = training_step.run(layers, small, display.announce) if training_step.OP in chosen else []
    kernels = [op for op in chosen if op != training_step.OP]
    return rows + (benchmark.run(kernels, small, display.announce) if kernels else [])


def _result_path(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"--out is {name!r}; write a plain name: letters, digits, `_`, `-` and `.`")
    return RESULTS / f"{name.removesuffix('.json')}.json"


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_atomic(path, [(json_module.dumps(to_json(list(rows)), indent=1) + "\n").encode()], parents=True)


def _render(name: str) -> dict[str, Any]:
    from trace_jax.benchmark.table import render

    path = _result_path(name)
    for needed in (path, DOCUMENT):
        if not needed.is_file():
            raise UserError(f"{needed} does not exist; run this at the root of the checkout, after trace-jax bench --out {path.stem}")
    rows = json_module.loads(path.read_text())
    write_atomic(DOCUMENT, [render(DOCUMENT.read_text(), path.stem, rows).encode()])
    return {"document": str(DOCUMENT), "rows": len(rows)}


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from trace_jax.benchmark.table import cells

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("op, shape", no_wrap=True)
    for heading in ("time", "MB", "rate", "of limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("of the peer's time")
    table.add_column("met", no_wrap=True)
    for row in rows:
        cell = cells(row)
        time = f"{cell['time, us']} us" if cell["time, us"] else ""
        peer = f"{cell['of peer']} of {cell['peer']}" if cell["of peer"] else ""
        name = f"{cell['op']}, {cell['implementation']}\n  {cell['shape']}"
        table.add_row(name, time, cell["MB"], cell["rate"], cell["of limit"], peer, cell["met"])
    console = result_console()
    console.print(table)
    console.print(f"device: {rows[0]['device']}; columns and targets: docs/performance.md", style="dim")
