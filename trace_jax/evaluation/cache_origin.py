"""What a saved guidance cache came from, in a file beside its batches: whose rollout it is, and every answer it must hold.

A cache by itself serves whatever survived, under any policy. To be measured it must be whole and belong to the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trace_jax.errors import UserError
from trace_jax.evaluation.precisions import PRECISIONS
from trace_jax.files import write_atomic
from trace_jax.train.setup import Setup

NAME = "origin.json"
FORMAT_VERSION = 1
WRITE_ONE = "write one with trace-jax rollout --save-cache"


@dataclass(frozen=True)
class CacheOrigin:
    """The origin of a cache.

    Args:
      task: name of the task that was answered.
      precision: of the rollout, as the engine executed it.
      identity: what else decides the engine's numbers, see `rollout_identity`.
      correct: sample id -> whether the answer is right, for all samples in the order of the prompts.
    """

    task: str
    precision: str
    identity: Mapping[str, str]
    correct: Mapping[int, bool]


def rollout_identity(setup: Setup, weights: str) -> dict[str, str]:
    """What decides an engine's numbers at a precision.

    Args:
      weights: checksum of the weight update, which covers the quantized weights and the static multipliers.
    """
    rollout = setup.config.rollout
    keys = ("engine", "activation_scale", "partial_sums", "residual_compensation")
    return {f"rollout.{key}": str(getattr(rollout, key)) for key in keys} | {"weights": weights}


def require_same(directory: Path, origin: CacheOrigin, identity: Mapping[str, str]) -> None:
    """Raises UserError for a cache of another policy, or of one with other settings."""
    for name, value in identity.items():
        found = origin.identity.get(name)
        if found != value:
            raise UserError(f"{directory} was written with {name} {found}, but this policy has {value}; {WRITE_ONE}")


def write_origin(directory: Path, origin: CacheOrigin) -> None:
    """Writes the origin into a cache folder.

    Raises:
      UserError: the folder cannot be written.
    """
    content = asdict(origin) | {"format_version": FORMAT_VERSION, "correct": list(origin.correct.items())}
    write_atomic(directory / NAME, [json.dumps(content).encode()])


def read_origin(directory: Path) -> CacheOrigin:
    """The origin of a cache folder.

    Raises:
      UserError: there is none, it is damaged or of another version, or its rollout mixed precisions.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such folder; {WRITE_ONE}")
    path = directory / NAME
    try:
        content = json.loads(path.read_bytes())
        version = content["format_version"]
        correct = {int(sample): bool(right) for sample, right in content["correct"]}
        origin = CacheOrigin(str(content["task"]), str(content["precision"]), dict(content["identity"]), correct)
    except FileNotFoundError:
        raise UserError(f"{directory} has no {NAME}, so nothing says which policy answered; {WRITE_ONE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read or is damaged; {WRITE_ONE}") from error
    if version != FORMAT_VERSION:
        raise UserError(f"{path} has format {version}, this version reads {FORMAT_VERSION}; {WRITE_ONE}")
    if origin.precision not in PRECISIONS:
        raise UserError(f"{directory} mixes precisions ({origin.precision}), but a trainer is compared at one; {WRITE_ONE}")
    return origin
