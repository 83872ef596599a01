"""Trajectories as files: one array file per batch, and JSON rows for people."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.guidance.record import GuidanceRecord
from trace_jax.guidance.site_record import SiteRecord
from trace_jax.rollout.array_file import encode_arrays, read_arrays
from trace_jax.rollout.audit import Audit
from trace_jax.rollout.routes import Routes
from trace_jax.rollout.trajectories import SEQUENCE_COLUMNS, TOKEN_COLUMNS, FinishReason, Trajectories

CONTENT = "trajectories"


@runtime_checkable
class Decoder(Protocol):
    """The part of a tokenizer that JSON rows need."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Text of token ids."""
        ...


def encode_trajectories(trajectories: Trajectories) -> list[bytes | memoryview]:
    """The file of a batch with its routes, guidance and audit, as chunks for `write_atomic` that view the arrays.

    Raises:
        ValueError: the batch does not fit the data contract.
    """
    trajectories.validate()
    columns = ("offsets", *TOKEN_COLUMNS, *SEQUENCE_COLUMNS, "top_ids", "top_logprobs")
    arrays = {name: array for name in columns if (array := getattr(trajectories, name)) is not None}
    meta: dict[str, Any] = {"content": CONTENT, "guidance": None, "audit": None}
    if trajectories.routes is not None:
        routes = trajectories.routes
        arrays |= {"routed_experts": routes.routed_experts, "routes_valid": routes.routes_valid, "moe_layer_ids": routes.moe_layer_ids}
    if trajectories.guidance is not None:
        arrays |= _prefixed("guidance", trajectories.guidance)
        meta["guidance"] = _describe(trajectories.guidance)
    if trajectories.audit is not None:
        arrays |= _prefixed("audit", trajectories.audit.record) | {"audit_sequences": trajectories.audit.sequences}
        meta["audit"] = _describe(trajectories.audit.record)
    return encode_arrays(arrays, meta)


def load_trajectories(path: Path) -> Trajectories:
    """Read what `encode_trajectories` made; columns are read-only views of the mapped file.

    Raises:
        LostContent: the file is missing, truncated or damaged.
        UserError: it cannot be read now, is of another version, or holds something else.
    """
    arrays, meta = read_arrays(path)
    if meta.get("content") != CONTENT:
        raise UserError(f"{path} holds {meta.get('content')!r}; give a trajectories file")
    routes = None
    if "routed_experts" in arrays:
        routes = Routes(arrays["routed_experts"], arrays["routes_valid"], arrays["moe_layer_ids"])
    audit = None if meta["audit"] is None else Audit(arrays["audit_sequences"], _restore("audit", meta["audit"], arrays))
    columns: dict[str, Any] = {name: arrays[name] for name in ("offsets", *TOKEN_COLUMNS, *SEQUENCE_COLUMNS)}
    trajectories = Trajectories(
        **columns,
        top_ids=arrays.get("top_ids"),
        top_logprobs=arrays.get("top_logprobs"),
        routes=routes,
        guidance=None if meta["guidance"] is None else _restore("guidance", meta["guidance"], arrays),
        audit=audit,
    )
    try:
        trajectories.validate()
    except ValueError as error:
        raise UserError(f"{path} does not hold valid trajectories ({error}); generate them again") from error
    return trajectories


def json_rows(trajectories: Trajectories, tokenizer: Decoder) -> Iterator[dict[str, Any]]:
    """One JSON-able object per sequence.

    `prompt` is the text before the first sampled token, `completion` the rest (with several turns also the environment's
    text; `sampled` tells them apart). An unscored reward is null. With all tokens sampled or none, one text is empty.
    """
    for index in range(trajectories.num_sequences):
        one = trajectories.sequence(index)
        tokens = one.tokens.tolist()
        drawn = np.flatnonzero(one.sampled)
        prompt_length = int(drawn[0]) if drawn.size else len(tokens)
        reward = float(one.reward[0])
        versions = one.weight_version[one.sampled]
        yield {
            "sample_id": int(one.sample_id[0]),
            "prompt_id": int(one.prompt_id[0]),
            "group": int(one.group[0]),
            "attempt": int(one.attempt[0]),
            "temperature": float(one.temperature[0]),
            "finish_reason": FinishReason(int(one.finish_reason[0])).name.lower(),
            "reward": None if math.isnan(reward) else reward,
            "weight_version": [int(versions.min()), int(versions.max())] if versions.size else None,
            "prompt": tokenizer.decode(tokens[:prompt_length]),
            "completion": tokenizer.decode(tokens[prompt_length:]),
            "prompt_length": prompt_length,
            "tokens": tokens,
            "sampled": one.sampled.astype(int).tolist(),
            "logprobs": [round(value, 6) for value in one.logprobs.tolist()],
        }


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically. NaN and infinity are refused: they are not JSON."""
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    # A lone surrogate (half of a character cut by the token limit) is not encodable; keep it visible instead of failing.
    write_atomic(path, [(line + "\n").encode("utf-8", "backslashreplace") for line in lines])


def _prefixed(prefix: str, record: GuidanceRecord) -> dict[str, np.ndarray]:
    return {f"{prefix}.{name}": array for name, array in record.arrays().items()}


def _describe(record: GuidanceRecord) -> dict[str, Any]:
    sites = {name: {"format": site.format, "block": site.block, "size": site.size} for name, site in record.sites.items()}
    return {"kind": record.kind, "sites": sites}


def _restore(prefix: str, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> GuidanceRecord:
    sites = {}
    for name, fields in meta["sites"].items():
        start = f"{prefix}.sites.{name}"
        present: dict[str, Any] = {field: arrays.get(f"{start}.{field}") for field in ("data", "multiplier", "version")}
        sites[name] = SiteRecord(**fields, layer_ids=arrays[f"{start}.layer_ids"], scales=arrays[f"{start}.scales"], **present)
    return GuidanceRecord(
        meta["kind"], sites, arrays[f"{prefix}.valid"], arrays[f"{prefix}.version"], recomputed=arrays.get(f"{prefix}.recomputed")
    )
