"""What a worker gets of this project: the packages that it shares with the trainer, and the entry point that vLLM looks for.

The folder goes onto the path of an environment that has vLLM and need not have jax, nor this project.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import rollout_bridge
from rollout_bridge.wire.code_version import SHARED

ENTRY_POINTS = "[vllm.general_plugins]\ntrace_jax = rollout_bridge.vllm_plugin.plugin:register\n"
METADATA = "Metadata-Version: 2.1\nName: trace-jax-worker\nVersion: 0\n"


def write_worker_folder(folder: Path) -> Path:
    """Fills a new folder; put it into PYTHONPATH.

    Returns:
      The folder.
    """
    package = Path(rollout_bridge.__file__).parent
    target = folder / package.name
    for name in SHARED:
        shutil.copytree(package / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "__init__.py", target)
    metadata = folder / "trace_jax_worker-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(METADATA)
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder
