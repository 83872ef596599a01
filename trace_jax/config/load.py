"""From a YAML file and dotted overrides to a checked `Config`, and back.

1. Read the file; every override `a.b=value` then replaces the value at that path. An override of `task.name` that names another
   task than the file first empties the file's `task` section, whose parameters, pattern and reward belong to the file's task.
2. Refuse unknown keys, naming the nearest known one.
3. Put the presets of `algorithm.name` and of `method` below what was set: algorithm < method < file < overrides.
4. Validate types and ranges, then combinations.

Every mistake ends in one `UserError` line that says what is wrong, where, and what to write instead.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trace_jax.config.checks import check
from trace_jax.config.keys import leaves, nearest_key, overlay, unknown_key, value_at
from trace_jax.config.layer_spec import resolve_layers as resolve_layers  # part of this module's interface
from trace_jax.config.presets import METHODS, algorithm_preset, preset
from trace_jax.config.schema import Config, TaskSection
from trace_jax.config.training_sections import AlgorithmSection
from trace_jax.config.yaml_text import dump_yaml, parse_yaml
from trace_jax.errors import UserError

COMMAND_LINE = "on the command line"

_PRESETS = {"method": Config.model_fields["method"].default, "algorithm.name": AlgorithmSection.model_fields["name"].default}


def load(path: str | Path, overrides: Sequence[str] = (), *, stated: str = COMMAND_LINE) -> Config:
    """Reads a configuration file.

    Args:
      path: YAML file with a mapping at its top.
      overrides: `key=value` texts with dotted keys and YAML values, applied in order.
      stated: where the overrides stand, for error messages.

    Raises:
      UserError: the file cannot be read, or the configuration is wrong.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a YAML configuration") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; give the YAML file in it, such as {path / 'config.yaml'}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; give a YAML configuration") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; give a readable YAML configuration") from None
    values = parse_yaml(text, str(path))
    if not isinstance(values, Mapping):
        raise UserError(f"{path} holds {_shown(values)} at its top; write a mapping such as `steps: 200`")
    return from_mapping(values, overrides, source=str(path), stated=stated)


def from_mapping(
    values: Mapping[str, Any], overrides: Sequence[str] = (), *, source: str = "the configuration", stated: str = COMMAND_LINE
) -> Config:
    """Builds a configuration from nested values; arguments and errors as in `load`."""
    base: dict[str, Any] = copy.deepcopy(dict(values))
    parsed = [parse_override(text) for text in overrides]
    if _names_another_task(base.get("task"), dict(parsed)):
        del base["task"]
    merged = base
    for key, value in parsed:
        merged = _set(merged, key.split("."), value)
    origin = _Origin(source, [key for key, _ in parsed], stated)
    wrong = unknown_key(merged)
    if wrong is not None:
        near = nearest_key(wrong)
        hint = f"did you mean {near}?" if near else "remove it; trace-jax train CONFIG --dry-run then prints every key"
        raise UserError(f"{wrong} ({origin.of(wrong)}) is not a known key; {hint}")
    below = preset(_chosen(merged, "method"))
    before = METHODS.get(str(_chosen(base, "method")), {})
    _refuse_contradiction("method", below, base, merged, dict(parsed), origin)
    algorithm = algorithm_preset(_chosen(overlay(below, merged), "algorithm.name"))
    _refuse_contradiction("algorithm.name", algorithm, overlay(before, base), overlay(below, merged), dict(parsed), origin)
    try:
        config = Config.model_validate(overlay(overlay(algorithm, below), merged))
    except ValidationError as error:
        raise UserError(_first_problem(error, origin)) from None
    check(config)
    return config


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `a.b=value` into the dotted key and the value read as YAML.

    Raises:
      UserError: there is no `=`, no key, an empty part of the key, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key != key.strip():
        raise UserError(f"{text!r} is not an override; write key=value, such as rollout.group_size=16")
    return key, parse_yaml(value, f"override {key}")


def dump(config: Config) -> str:
    """The whole configuration as YAML; `load` of it gives an equal configuration."""
    return dump_yaml(config.model_dump(mode="json"))


class _Origin:
    """Says where a key was set, for error messages."""

    def __init__(self, source: str, overridden: Sequence[str], stated: str) -> None:
        self.source = source
        self.overridden = overridden
        self.stated = stated

    def of(self, key: str) -> str:
        overridden = any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in self.overridden)
        return self.stated if overridden else f"in {self.source}"


def _set(values: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    """A copy of nested mappings with the value at `path` replaced; a value that stood in the way is replaced too."""
    name, rest = path[0], path[1:]
    if not rest:
        return {**values, name: value}
    below = values.get(name)
    return {**values, name: _set(below if isinstance(below, Mapping) else {}, rest, value)}


def _names_another_task(section: Any, overrides: Mapping[str, Any]) -> bool:
    """Whether overrides name another task than a file's task section does."""
    return isinstance(section, Mapping) and "task.name" in overrides and overrides["task.name"] != section.get("name", TaskSection().name)


def _chosen(values: Mapping[str, Any], preset_key: str) -> Any:
    """Which method or algorithm the values name; the default if none."""
    is_set, value = value_at(values, preset_key)
    return value if is_set else _PRESETS[preset_key]


def _refuse_contradiction(
    preset_key: str,
    chosen: Mapping[str, Any],
    base: Mapping[str, Any],
    merged: Mapping[str, Any],
    overrides: Mapping[str, Any],
    origin: _Origin,
) -> None:
    """A method or algorithm given by an override must not be undone by a file that spells out another one's keys.

    Args:
      preset_key: `method` or `algorithm.name`.
      chosen: what its value stands for.
      base, merged: what the file says, and what it says with the overrides; for an algorithm, each above what its method stands for.
    """
    now = _chosen(merged, preset_key)
    if now == _chosen(base, preset_key):
        return
    for key, value in leaves(chosen):
        is_set, written = value_at(base, key)
        overridden = any(key == name or key.startswith(f"{name}.") for name in overrides)
        if is_set and written != value and not overridden:
            raise UserError(
                f"{preset_key}={now} {origin.stated} stands for {key}: {_shown(value)}, but {origin.source} says {_shown(written)}; "
                f"remove that line from the file, or add {key}={_shown(value)}"
            )


def _first_problem(error: ValidationError, origin: _Origin) -> str:
    problems = error.errors()
    first = problems[0]
    key = ".".join(str(part) for part in first["loc"])
    context = first.get("ctx", {})
    wanted = {
        "int_type": "write a whole number",
        "float_type": "write a number",
        "bool_type": "write true or false",
        "string_type": "write text",
        "tuple_type": "write a list",
        "dict_type": "write a mapping",
        "model_type": "write a mapping",
        "literal_error": f"write one of: {str(context.get('expected', '')).replace(' or ', ', ').replace(chr(39), '')}",
        "value_error": str(context.get("error", "")),
        "finite_number": "write a finite number",
        "greater_than": f"it must be greater than {context.get('gt')}",
        "greater_than_equal": f"it must be at least {context.get('ge')}",
        "less_than": f"it must be less than {context.get('lt')}",
        "less_than_equal": f"it must be at most {context.get('le')}",
    }.get(first["type"], first["msg"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{key} is {_shown(first['input'])} ({origin.of(key)}); {wanted}{more}"


def _shown(value: Any) -> str:
    """A value as a person wrote it: YAML words, shortened, on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, Mapping):
        return "a mapping"
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
