"""Scalars mean what a person expects."""

from __future__ import annotations

from typing import Any

import pytest

from trace_jax.config.yaml_text import dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1.0e-6", 1e-6),
        ("4.E+2", 400.0),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("on", "on"),
        ("no", "no"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
    ],
)
def test_scalars(text: str, value: Any) -> None:
    assert parse_yaml(text, "text") == value and type(parse_yaml(text, "text")) is type(value)


@pytest.mark.parametrize(
    "text",
    [
        "1e5",
        "true",
        "null",
        "~",
        "",
        "3",
        ".5",
        "on",
        "a: b",
        "- x",
        " x ",
        "#",
        "é\n",
        "<<",
        "\x85",
        "a\u2028b",
        "\ufeff",
        "\x07",
        "two\nlines",
    ],
)
def test_text_stays_text(text: str) -> None:
    assert parse_yaml(dump_yaml({"key": text}), "text") == {"key": text}


def test_merge_keys() -> None:
    assert parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", "text")["b"] == {"x": 1, "y": 3}
