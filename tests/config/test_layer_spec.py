"""The grammar of layer specifications."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.config import parse_layers, resolve_layers
from trace_jax.errors import UserError


@pytest.mark.parametrize(
    ("spec", "layers", "expected"),
    [
        ("all", 3, (0, 1, 2)),
        ("last_half", 4, (2, 3)),
        ("last_half", 5, (2, 3, 4)),
        ("last_half", 1, (0,)),
        ("last:2", 5, (3, 4)),
        ("last:5", 5, (0, 1, 2, 3, 4)),
        ("first:2", 5, (0, 1)),
        ([3, 1], 4, (1, 3)),
    ],
)
def test_resolve(spec: str | list[int], layers: int, expected: tuple[int, ...]) -> None:
    assert resolve_layers(spec, layers) == expected


@pytest.mark.parametrize("spec", ["last:6", "first:6", [5], [0, 99]])
def test_layers_the_model_does_not_have(spec: str | list[int]) -> None:
    with pytest.raises(UserError, match="the model has 5 layers"):
        resolve_layers(spec, 5)


@pytest.mark.parametrize("spec", ["half", "last:", "last:-1", "last:0", "first:x", "", [], [1, 1], [-1], [True], [1.0], 3, None, ["1"]])
@pytest.mark.usefixtures("unchecked")
def test_outside_the_grammar(spec: object) -> None:
    with pytest.raises(ValueError):
        parse_layers(spec)
    with pytest.raises(UserError):
        resolve_layers(spec, 4)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 100), st.data())
def test_first_and_last_partition_the_layers(layers: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, layers))
    last = resolve_layers(f"last:{cut}", layers)
    first = resolve_layers(f"first:{layers - cut}", layers) if cut < layers else ()
    assert (*first, *last) == resolve_layers("all", layers)
