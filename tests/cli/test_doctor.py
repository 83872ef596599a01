"""`doctor` and the table of versions that fit together."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import pallas_kernels
import rollout_bridge
import trace_jax
from trace_jax.cli.app import main
from trace_jax.cli.doctor import OPTIONAL
from trace_jax.cli.versions import installed_version_problem, number, version_problem


def test_doctor_prints_and_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in ("Python", "jax", "flax", "device", "/dev/shm", "vllm", "fit together"):
        assert part in out


def test_doctor_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problem"] is None and found["devices"] and "jax" in found["engines"]
    assert found["versions"]["jax"] and set(found["kernels"]) >= {"reference", "pallas"}


@pytest.mark.parametrize("distribution", ["jax-triton", "vllm"])
def test_optional_packages_are_called_unused_until_something_imports_them(distribution: str) -> None:
    sources = [path for package in (pallas_kernels, trace_jax, rollout_bridge) for path in Path(package.__path__[0]).rglob("*.py")]
    imported = {
        name.split(".")[0]
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""])
    }
    assert ("not used" in OPTIONAL[distribution]) == (distribution.replace("-", "_") not in imported)


def test_installed_versions_fit() -> None:
    assert installed_version_problem() is None


@pytest.mark.parametrize(("jax", "flax"), [("0.10.2", "0.12.8"), ("0.11.2", "0.12.10"), ("0.12.0.1", "0.12.12")])
def test_pairs_that_fit(jax: str, flax: str) -> None:
    assert version_problem(jax, flax) is None


@pytest.mark.parametrize(
    ("jax", "flax", "part"),
    [
        ("0.11.2", "0.12.8", "install flax 0.12.10"),
        ("0.11.2", "0.12.9", "install flax 0.12.10"),
        ("0.10.2", "0.12.10", "install flax 0.12.8"),
        ("0.9.1", "0.12.8", "jax 0.9.1 is not supported"),
        ("0.13.0", "0.12.12", "jax 0.13.0 is not supported"),
        ("0.10.2", "0.11.0", "flax 0.11.0 is not supported"),
        (None, "0.12.8", "jax is not installed"),
        ("0.10.2", None, "flax is not installed"),
    ],
)
def test_jax_flax_skew_is_named(jax: str | None, flax: str | None, part: str) -> None:
    message = version_problem(jax, flax)
    assert message is not None and part in message and "install" in message


def test_version_numbers() -> None:
    assert number("0.12.0.1") == (0, 12, 0) and number("2.13.0+cpu") == (2, 13, 0) and number("0.11.2rc1") == (0, 11, 2)
