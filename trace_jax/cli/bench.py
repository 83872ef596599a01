"""`trace-jax bench`: time of each kernel on this machine, with the bytes it moves."""

from __future__ import annotations

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


def bench(
    ops: Annotated[list[str] | None, typer.Argument(metavar="OP", help="Operations; all by default.")] = None,
    small: Annotated[bool, typer.Option("--small", help="Small shapes: seconds instead of minutes.")] = False,
    out: Annotated[str | None, typer.Option("--out", metavar="NAME", help="Write the rows to benchmarks/results/NAME.json.")] = None,
    json: Json = False,
) -> None:
    """Time the kernels, and compare with the machine's limits where they are known."""
    path = None if out is None else _result_path(out)

    def work(display: Display) -> dict[str, Any]:
        from pallas_kernels import benchmark

        display.announce("timing the kernels")
        try:
            rows = benchmark.run(ops or None, small)
        except ValueError as error:
            raise UserError(str(error)) from error
        if path is not None:
            _write(path, rows)
        return {"rows": rows}

    run_and_show(work, lambda result: _print(result["rows"]), json=json)


def _result_path(name: str) -> Path:
    if not re.fullmatch(r"[\w.-]+", name):
        raise UserError(f"--out is {name!r}; write a plain name: letters, digits, `_`, `-` and `.`")
    return RESULTS / f"{name.removesuffix('.json')}.json"


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    import json

    write_atomic(path, [(json.dumps(to_json(list(rows)), indent=1) + "\n").encode()], parents=True)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("op", "implementation"):
        table.add_column(heading, no_wrap=True)
    table.add_column("shape")
    for heading in ("time", "MB moved", "GB/s", "of limit"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        time_us, moved, share = row["time_us"], row["bytes"], row["limit_share"]
        table.add_row(
            str(row["op"]),
            str(row["implementation"]),
            str(row["shape"]),
            f"{time_us:,.0f} us",
            f"{moved / 1e6:,.2f}",
            f"{moved / time_us / 1e3:,.2f}",
            "" if share is None else f"{share:.0%}",
        )
    console = result_console()
    console.print(table)
    console.print(f"bfloat16 input; device: {rows[0]['device']}; the limit is the device's copy speed", style="dim")
