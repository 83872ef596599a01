"""The checkpoint that a worker starts from: the exporter's layout without weights, which come by the first update."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rollout_bridge.export.layout import require_whole_blocks, tensor_plan
from rollout_bridge.export.quant_config import MODELOPT_FILE, hf_quant_config, quantization_config
from rollout_bridge.export.settings import ExportSettings
from rollout_bridge.export.shards import ShardWriter
from trace_jax.models.hf import MAX_SHARD_BYTES, write_config
from trace_jax.models.policy import Policy


def write_blank_checkpoint(directory: Path, policy: Policy, settings: ExportSettings) -> Path:
    """Fills a new folder: zeros, which take no room on the disk, and multipliers of one.

    Returns:
      The folder.

    Raises:
      UserError: a model whose rows are no whole blocks of the format.
    """
    require_whole_blocks(policy, settings)
    directory.mkdir()
    plan = tensor_plan(policy, settings)
    with ShardWriter(directory, plan, MAX_SHARD_BYTES) as writer:
        for spec in plan:
            if spec.dtype == "F32":
                writer.write(spec.name, np.ones(spec.shape, np.float32))
            else:
                writer.leave_zero(spec.name)
    quantization = quantization_config(policy, settings)
    if settings.format == "nvfp4":
        (directory / MODELOPT_FILE).write_text(json.dumps(hf_quant_config(policy, settings)))
    values = {} if quantization is None else {"quantization_config": quantization}
    write_config(directory, policy.family, policy.config, torch_dtype="bfloat16", **values)
    return directory
