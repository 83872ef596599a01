"""The Triton kernels compile for Hopper and Blackwell, to code whose bits and cost are as intended. Running it takes a GPU (`test_gpu`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.triton

ROOT = Path(__file__).resolve().parents[2]

MOST_INSTRUCTIONS = {"quantize": 24, "dequantize": 17, "fake_quant": 25, "guided_fake_quant": 50}
"""For each value, a tenth more than there are. A division, or single bytes instead of words, would cost more."""


@pytest.fixture(scope="module")
def builds() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(ROOT / ".cache" / "triton")
    program = [sys.executable, "-m", "tests.pallas_kernels.triton_builds"]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_every_operation_compiles_for_both_generations(builds):
    for each in builds:
        assert f".target sm_{each['capability']}" in each["ptx"]
    assert {each["name"].split()[0] for each in builds} == set(MOST_INSTRUCTIONS)
    assert {each["capability"] for each in builds} == {90, 100}


def test_no_rounding_is_left_to_the_assembler(builds):
    """It may contract what does not say how it rounds, and flush what says so."""
    for each in builds:
        assert "mul.rn.f32" in each["ptx"]
        assert not re.findall(r"\b(?:(?:mul|add|sub)\.f32|fma\.\S+|\S+\.ftz\S*)", each["ptx"]), each["name"]


def test_threads_own_their_groups(builds):
    for each in builds:
        assert each["shared_bytes"] == 0 and "shfl" not in each["ptx"], each["name"]
        # 16 bytes, eight values, are one access where they are aligned.
        assert each["size"] % 16 or "ld.global.v4.b32" in each["ptx"] or "st.global.v4.b32" in each["ptx"], each["name"]


def test_instructions_for_each_value(builds):
    counts = {f"{each['name']} sm_{each['capability']}": each["instructions"] for each in builds if each["size"] % 16 == 0}
    assert not {name: count for name, count in counts.items() if count > MOST_INSTRUCTIONS[name.split()[0]]}, counts
