"""What is compared: names of presets, and variants that a file defines for whatever a preset does not say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trace_jax.config import METHODS
from trace_jax.config.keys import leaves
from trace_jax.config.yaml_text import parse_yaml
from trace_jax.errors import UserError
from trace_jax.tasks.importing import nearest

Variants: TypeAlias = dict[str, tuple[str, ...]]
"""Name -> the `key=value` settings that it stands for."""

DEFAULT = ("bf16", "naive", "qat", "trace")
"""Methods that are compared when none is named."""

COMMON = (
    *("model", "tokenizer", "task", "sft", "calibration", "eval", "checkpoint", "loggers", "steps", "seed"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens", "rollout.max_prompt_tokens"),
)
"""Sections and keys that all runs share: who starts or is measured in another way cannot be compared."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def chosen_variants(names: Sequence[str] | None, file: Path | None) -> Variants:
    """The variants to compare, in order.

    Args:
      names: of presets or of variants of `file`; None takes all of the file, or `DEFAULT` without one.
      file: YAML that maps a name to config keys, such as `last_layer: {method: trace, guidance: {layers: "last:1"}}`.

    Raises:
      UserError: an unknown name, one that stands twice, none at all, or a file that cannot be read or used.
    """
    defined = {} if file is None else read_variants(file)
    known: Variants = {name: (f"method={name}",) for name in METHODS} | defined
    names = list(names) if names is not None else list(defined or DEFAULT)
    if not names:
        raise UserError(f"--methods names nothing; write some of: {', '.join(known)}")
    for index, name in enumerate(names):
        if name not in known:
            unknown = f"--methods {name!r} is unknown{nearest(name, known)}"
            raise UserError(f"{unknown}; write some of: {', '.join(known)}, or define it in a file for --variants")
        if name in names[:index]:
            raise UserError(f"--methods names {name} twice; name each method once (--seeds repeats all of them)")
    return {name: known[name] for name in names}


def read_variants(file: Path) -> Variants:
    """The variants of a file.

    Raises:
      UserError: it cannot be read, is no mapping of names to keys, takes the name of a preset, or sets what all runs share.
    """
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"{file}: cannot be read ({reason}); give --variants a YAML file of variants") from None
    if not isinstance(values, Mapping) or not values:
        raise UserError(f"{file}: no variants; write a mapping such as `last_layer: {{method: trace, guidance: {{layers: 'last:1'}}}}`")
    return {name: _settings(file, name, keys) for name, keys in values.items()}


def _settings(file: Path, name: str, keys: Any) -> tuple[str, ...]:
    where = f"{file}: variant {name}"
    if not _NAME.fullmatch(name):
        raise UserError(f"{where}: the name becomes that of a folder; write letters, digits, `.`, `_` and `-`")
    if name in METHODS:
        raise UserError(f"{where} has the name of a preset; choose another name")
    if not isinstance(keys, Mapping) or not keys:
        raise UserError(f"{where} sets nothing; write config keys such as `{{method: trace, guidance: {{layers: 'last:1'}}}}`")
    for key, _ in leaves(keys):
        if any(key == common or key.startswith(f"{common}.") for common in COMMON):
            raise UserError(f"{where} sets {key}, which all runs of a comparison share; write it into the config instead")
    return tuple(f"{key}={json.dumps(value)}" for key, value in leaves(keys))
