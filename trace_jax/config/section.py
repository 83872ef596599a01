"""What every section of the configuration is built from: the base class, and the types of single values."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Split: TypeAlias = Literal["train", "validation", "test"]
Positive: TypeAlias = Annotated[int, Field(ge=1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Rate: TypeAlias = Annotated[float, Field(gt=0)]
Beta: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


def distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    """The names, refused if one stands twice."""
    if len(set(values)) != len(values):
        raise ValueError("each name may appear once")
    return values


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
