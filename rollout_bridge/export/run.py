"""`trace-jax export`: from an Orbax checkpoint to a Hugging Face directory, one layer in memory at a time.

The directory is written as `OUT.partial-...`, config.json last, verified there if asked, and renamed when it is whole.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from rollout_bridge.export.encode import encoded_tensors
from rollout_bridge.export.layout import require_exportable, require_whole_blocks, tensor_plan, unquantized_modules
from rollout_bridge.export.memory import peak_bytes, resident_bytes
from rollout_bridge.export.quant_config import MODELOPT_FILE, hf_quant_config, quantization_config
from rollout_bridge.export.settings import ExportSettings
from rollout_bridge.export.shards import ShardWriter
from rollout_bridge.export.verify import verify_export
from trace_jax.config import from_mapping
from trace_jax.errors import UserError
from trace_jax.files import require_writable
from trace_jax.models.hf import MAX_SHARD_BYTES, appearing_directory, carried_files, write_config
from trace_jax.quantization.calibration import calibrate_by_layers
from trace_jax.terminal import Announce, unannounced
from trace_jax.tokenizers import BUILT_IN, load_tokenizer
from trace_jax.train.hf_policy import open_hf_policy
from trace_jax.train.setup import build_setup, calibration_sequences
from trace_jax.train.stored_policy import StoredPolicy, open_stored_policy

SPARE_BYTES = 64 << 20
"""Room on the disk beside the tensors, for configs and tokenizer."""


def export_checkpoint(
    path: Path,
    out: Path,
    settings: ExportSettings,
    *,
    verify: bool = False,
    task: str | None = None,
    overrides: Sequence[str] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
    announce: Announce = unannounced,
) -> dict[str, Any]:
    """Writes a checkpoint as a directory that vLLM loads; it appears complete or not at all.

    In memory are the float32 routed experts of one layer, a block of experts while it is rounded, and at times the largest tensor
    outside the experts; while a checkpoint without multipliers is calibrated, one layer and what the prompts leave in the residual stream.
    A checkpoint that was not stored layer by layer is decoded a whole array at a time.

    Args:
      path: run directory, checkpoint directory, or one step of it.
      out: the new directory.
      verify: whether every value is read back and compared before the directory gets its name.
      task: whose prompts calibrate a checkpoint without multipliers; the run's own task by default.
      overrides: `key=value` settings for that calibration.
      max_shard_bytes: limit of one tensor file.

    Returns:
      What was written: sizes, tensors, seconds, memory.

    Raises:
      UserError: `out` exists or does not fit the disk, the checkpoint is damaged, not finite or of a shape that vLLM does not load, the
        settings do not fit it, or verification fails.
    """
    started, before = time.perf_counter(), resident_bytes()
    if os.path.lexists(out):
        raise UserError(f"{out} exists; choose another folder, nothing is overwritten")
    require_writable(out)
    announce(f"checking {path}")
    with ExitStack() as opened:
        stored = open_hf_policy(path, opened) if (path / "config.json").is_file() else open_stored_policy(path)
        result = _export(stored, out, settings, verify, task, overrides, max_shard_bytes, announce)
    return result | {
        "seconds": round(time.perf_counter() - started, 3),
        "memory_before_bytes": before,
        "memory_peak_bytes": peak_bytes(),
    }


def _export(
    stored: StoredPolicy,
    out: Path,
    settings: ExportSettings,
    verify: bool,
    task: str | None,
    overrides: Sequence[str],
    max_shard_bytes: int,
    announce: Announce,
) -> dict[str, Any]:
    require_exportable(stored.policy, settings)
    require_whole_blocks(stored.policy, settings)
    layers = settings.quantized_layers(stored.policy.config.num_layers)
    plan = tensor_plan(stored.policy, settings)
    size = sum(spec.num_bytes for spec in plan)
    _require_space(out, size)
    missing = sorted(set(_sites(stored, settings)) - set(stored.multipliers))
    if missing:
        announce(f"calibrating {', '.join(missing)}, one layer in memory at a time")
    multipliers = _multipliers(stored, settings, task, overrides) if missing else _checked(stored, stored.multipliers, settings)
    with appearing_directory(out.absolute()) as directory:
        announce(f"writing {size / 1e6:.1f} MB to {directory}")
        with ShardWriter(directory, plan, max_shard_bytes) as writer:
            for name, tensor in encoded_tensors(stored.policy, settings, stored.params, multipliers):
                writer.write(name, tensor)
        _write_tokenizer(directory, stored.tokenizer)
        _write_configs(directory, stored, settings)
        compared = None
        if verify:
            announce("verifying: decoding every value and comparing it with the trainer's")
            compared = verify_export(directory, stored.policy, settings, stored.params, multipliers)
    return {
        "export": str(out),
        "checkpoint": str(stored.folder),
        "version": stored.meta["progress"]["version"],
        "format": settings.format,
        "activations": settings.format if settings.rounds_activations else "bf16",
        "quantized_layers": list(layers),
        "kv_cache_declared": settings.declare_kv,
        "calibrated_now": bool(missing),
        "trained_for": stored.meta["config"]["rollout"]["weights"] if stored.has_task else None,
        "residual_fraction_left_out": stored.meta["config"]["rollout"]["residual_compensation"]["fraction"],
        "bytes_float32": stored.params.num_bytes,
        "bytes_bf16": stored.params.num_bytes // 2,
        "bytes_written": size,
        "tensors": len(plan),
        "modules_unquantized": len(unquantized_modules(stored.policy, settings)),
        "files": len(writer.files),
        "values_verified": compared,
    }


def print_export(result: Mapping[str, Any]) -> None:
    """Prints a result for a person."""
    megabytes = {name: result[name] / 1e6 for name in ("bytes_bf16", "bytes_written", "memory_peak_bytes")}
    print(
        f"{result['export']}: {result['tensors']} tensors, {megabytes['bytes_written']:.2f} MB in {result['format']} "
        f"(BF16: {megabytes['bytes_bf16']:.2f} MB), {result['seconds']:.1f} s, peak memory {megabytes['memory_peak_bytes']:.0f} MB"
    )
    if result["trained_for"] and result["format"] not in ("bf16", result["trained_for"]):
        print(
            f"note: the checkpoint was trained for a rollout in {result['trained_for']}; {result['format']} is quantization after training"
        )
    if result["residual_fraction_left_out"]:
        print(
            f"note: the run compensated the residual of {result['residual_fraction_left_out']:.0%} of the input channels; an engine that "
            "loads this does not, unless rollout.engine=vllm drives it"
        )
    if result["values_verified"] is not None:
        print(f"verified: {result['values_verified']} values decode to what the trainer computes with")


def _multipliers(
    stored: StoredPolicy, settings: ExportSettings, task: str | None, overrides: Sequence[str]
) -> dict[str, Float[np.ndarray, " L"]]:
    """Static multipliers from the prompts of a task, for a checkpoint that has none."""
    if task is None and not stored.has_task:
        raise UserError(f"{stored.folder} was never calibrated; name a task whose prompts are like those that it will answer: --task TASK")
    values = stored.meta["config"] | {"tokenizer": stored.tokenizer}
    chosen = [] if task is None else [f"task.name={task}"]
    config = from_mapping(values, [*chosen, *overrides], source=f"the config of {stored.folder}")
    setup = build_setup(config, (stored.policy.family, stored.policy.config))
    multipliers = calibrate_by_layers(setup.policy, stored.params.read, calibration_sequences(setup), config.calibration.headroom)
    return _checked(stored, multipliers, settings)


def _sites(stored: StoredPolicy, settings: ExportSettings) -> list[str]:
    """The sites whose multipliers are written: those that the family has."""
    return [site for site in settings.sites if stored.policy.config.layers_of(site)]


def _checked(stored: StoredPolicy, multipliers: Mapping[str, Any], settings: ExportSettings) -> dict[str, Float[np.ndarray, " L"]]:
    values = {site: np.asarray(multipliers[site], np.float32) for site in _sites(stored, settings)}
    for site, value in values.items():
        if not (np.isfinite(value) & (value > 0)).all():
            layer = int(np.flatnonzero(~(np.isfinite(value) & (value > 0)))[0])
            raise UserError(f"{stored.folder}: the multiplier of {site} in layer {layer} is {value[layer]}; take an earlier checkpoint")
    return values


def _require_space(out: Path, size: int) -> None:
    existing = next(path for path in out.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if free < size + SPARE_BYTES:
        needed = math.ceil((size + SPARE_BYTES) / 1e6)
        raise UserError(f"{out} needs {needed} MB and {existing} has {free / 1e6:.0f} MB free; free some space or choose another folder")


def _write_tokenizer(directory: Path, tokenizer: str) -> None:
    """Copies tokenizer and generation files; of a built-in tokenizer, which has none, the ids that end an answer."""
    if tokenizer in BUILT_IN:
        loaded = load_tokenizer(tokenizer)
        ids = {"bos_token_id": loaded.bos_id, "eos_token_id": list(loaded.stop_ids), "pad_token_id": loaded.pad_id}
        (directory / "generation_config.json").write_text(json.dumps(ids, indent=2, sort_keys=True) + "\n")
        return
    carried = carried_files(tokenizer)
    if not carried:
        raise UserError(f"the checkpoint's tokenizer {tokenizer} holds no tokenizer.json; put the folder back where the run found it")
    for file in carried:
        shutil.copyfile(file, directory / file.name)


def _write_configs(directory: Path, stored: StoredPolicy, settings: ExportSettings) -> None:
    """config.json comes last: a directory without it is no checkpoint to anyone."""
    quantization = quantization_config(stored.policy, settings)
    if settings.format == "nvfp4":
        text = json.dumps(hf_quant_config(stored.policy, settings), indent=2, sort_keys=True)
        (directory / MODELOPT_FILE).write_text(text + "\n")
    values = {} if quantization is None else {"quantization_config": quantization}
    write_config(directory, stored.policy.family, stored.policy.config, torch_dtype="bfloat16", **values)
