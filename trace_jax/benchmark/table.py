"""A benchmark's result file as the table of a document, between two marker lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.errors import UserError
from trace_jax.markdown import markdown_table, replace_block

_TEXTS = ("op", "implementation", "shape", "peer", "target", "met")


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a row that a person reads, by heading; empty where the row has none."""
    time_us, moved, flops = row["time_us"], row["bytes"], row["flops"]
    rate = ""
    if time_us is not None and flops is not None:
        teraflops = flops / time_us / 1e6
        rate = f"{teraflops:,.1f} TFLOP/s" if teraflops >= 1 else f"{teraflops * 1e3:,.1f} GFLOP/s"
    elif time_us is not None and moved is not None:
        rate = f"{moved / time_us / 1e3:,.1f} GB/s"

    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return {
        "op": row["op"],
        "implementation": row["implementation"],
        "shape": row["shape"],
        "time, us": shown(time_us, ",.0f"),
        "MB": shown(None if moved is None else moved / 1e6, ",.2f"),
        "rate": rate,
        "of limit": shown(row["limit_share"], ".0%"),
        "peer": row["peer"] or "",
        "of peer": shown(row["ratio"], ",.2f"),
        "target": row["target"] or "",
        "met": {True: "yes", False: "no", None: ""}[row["met"]],
    }


def benchmark_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a Markdown table, without the columns in which no row has anything."""
    shown = [cells(row) for row in rows]
    headings = [heading for heading in shown[0] if any(row[heading] for row in shown)]
    return markdown_table(headings, [[row[heading] for heading in headings] for row in shown], _TEXTS)


def render(text: str, name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The document with the table of result file `name` brought up to date.

    It stands between the lines `<!-- benchmark NAME -->` and `<!-- end -->`, below a line that says where and when it was made.

    Raises:
      UserError: the document has no such lines, or the file no rows.
    """
    if not rows:
        raise UserError(f"the benchmark {name} has no rows; write it anew with trace-jax bench --out {name}")
    first = rows[0]
    where = f"{first['date']}, {first['device']}, {', '.join(f'{package} {version}' for package, version in first['versions'].items())}"
    return replace_block(text, f"benchmark {name}", f"{where}\n\n{benchmark_table(rows)}")
