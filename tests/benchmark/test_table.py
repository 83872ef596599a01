"""The Markdown table of a results file."""

from __future__ import annotations

import pytest

from trace_jax.benchmark.table import benchmark_table, render
from trace_jax.errors import UserError

EMPTY = dict.fromkeys("op implementation shape time_us bytes flops limit_share peer ratio target met".split())
STAMP = {"device": "cpu", "versions": {"jax": "0.1"}, "date": "2026-01-02"}
MEMORY_BOUND = EMPTY | STAMP | {"op": "a", "implementation": "pallas", "shape": "8x4", "time_us": 2000.0, "bytes": 3_000_000}
PRODUCT = MEMORY_BOUND | {"op": "b", "flops": 4 * 10**9, "limit_share": 0.256, "peer": "p", "ratio": 0.5, "target": "<= 1", "met": True}


def test_units_and_empty_columns():
    assert benchmark_table([MEMORY_BOUND]) == (
        "| op | implementation | shape | time, us | MB | rate |\n"
        "| --- | --- | --- | ---: | ---: | ---: |\n"
        "| a | pallas | 8x4 | 2,000 | 3.00 | 1.5 GB/s |\n"
    )
    lines = benchmark_table([PRODUCT, EMPTY | {"op": "c", "implementation": "", "shape": ""}]).splitlines()
    assert lines[2] == "| b | pallas | 8x4 | 2,000 | 3.00 | 2.0 TFLOP/s | 26% | p | 0.50 | <= 1 | yes |"
    assert lines[3].count("|") == lines[2].count("|")


def test_only_the_named_table_changes():
    text = "a\n<!-- benchmark x -->\nold\n<!-- end -->\nb\n<!-- benchmark y -->\nkept\n<!-- end -->\n"
    done = render(text, "x", [MEMORY_BOUND])
    assert "old" not in done and "kept" in done and "2026-01-02, cpu, jax 0.1\n" in done
    assert render(done, "x", [MEMORY_BOUND]) == done
    with pytest.raises(UserError, match="no place for the benchmark z"):
        render(text, "z", [MEMORY_BOUND])
    with pytest.raises(UserError, match="has no rows"):
        render(text, "x", [])
