"""The benchmark makes rows of the agreed schema."""

from __future__ import annotations

import json

import pytest

from pallas_kernels import benchmark

FIELDS = ("op implementation shape dtype time_us bytes flops limit_share peer peer_time_us ratio target met device versions date").split()


def test_rows_have_the_schema():
    rows = benchmark.run(["fake_quant", "guided_fake_quant"], small=True)
    assert len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert list(row) == FIELDS and row["time_us"] > 0 and row["limit_share"] > 0
        assert (row["peer"] is None) == (row["implementation"] == "reference")
    assert json.loads(json.dumps(rows)) == rows
    assert {row["op"] for row in rows} == {"fake_quant/nvfp4", "fake_quant/mxfp4", "guided_fake_quant/nvfp4", "guided_fake_quant/mxfp4"}


def test_unknown_op_is_explained():
    with pytest.raises(ValueError, match="unknown op matmul"):
        benchmark.run(["matmul"], small=True)
