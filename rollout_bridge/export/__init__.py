"""Export of checkpoints to Hugging Face directories that vLLM loads: NVFP4, MXFP4 or BF16."""

from rollout_bridge.export.run import export_checkpoint
from rollout_bridge.export.settings import ExportSettings
from rollout_bridge.export.verify import verify_export

__all__ = ["ExportSettings", "export_checkpoint", "verify_export"]
