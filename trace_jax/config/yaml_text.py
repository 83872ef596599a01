"""YAML as a configuration needs it: the scalar rules of YAML 1.2 and no key given twice.

PyYAML follows YAML 1.1, where `1e-6` is text, `on` is a boolean, `1:30` is 90 and `2026-01-01` is a date. Here numbers
look like JSON numbers, booleans are `true` and `false`, and the rest is text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from trace_jax.errors import UserError

_RULES = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for tag, pattern, first in _RULES:
        for letter in first:
            table.setdefault("" if letter == "\0" else letter, []).append((tag, re.compile(rf"(?:{pattern})\Z")))
    return table


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _resolvers()  # pyright: ignore[reportIncompatibleVariableOverride]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is not text", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _resolvers()  # pyright: ignore[reportIncompatibleVariableOverride]

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Quotes text with odd characters (other line ends, controls), which PyYAML would write so that it reads back changed."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text.

    Args:
      text: the whole text.
      source: how to call it in an error message.

    Raises:
      UserError: it is not YAML, or gives a key twice; names line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{source}{place}: {_one_line(error.problem or error.context)}; correct the YAML there") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{source}: {_one_line(error)}; correct the YAML") from None


def dump_yaml(value: Any) -> str:
    """Block-style YAML that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
