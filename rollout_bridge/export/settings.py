"""What the user chooses about an export, checked before anything is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pallas_kernels import BlockFormat, block_format
from trace_jax.config.layer_spec import GRAMMAR, resolve_layers
from trace_jax.errors import UserError
from trace_jax.quantization.multipliers import KV_SITES
from trace_jax.quantization.plan import SITES

FORMATS = ("nvfp4", "mxfp4", "bf16")
EXPERTS = "routed_experts"


@dataclass(frozen=True)
class ExportSettings:
    """How a checkpoint is exported.

    Args:
      format: `nvfp4` (ModelOpt layout), `mxfp4` (compressed-tensors layout) or `bf16`.
      scope: `routed_experts`, or `routed_experts:LAYERS` with `all`, `last_half`, `last:N`, `first:N` or ids like `2,3`.
      declare_kv: `nvfp4` makes vLLM keep its KV cache in FP4 by default; None leaves that to its command line.
      activations: None rounds the experts' inputs to the format of the weights (W4A4); `bf16` leaves them (W4A16).

    Raises:
      UserError: an unknown value, or an FP4 KV cache declared in a layout that has no field for it.
    """

    format: str = "nvfp4"
    scope: str = EXPERTS
    declare_kv: str | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UserError(f"--format {self.format} is unknown; write one of {', '.join(FORMATS)}")
        if self.scope.partition(":")[0] != EXPERTS:
            raise UserError(
                f"--scope {self.scope} cannot be exported: only the inputs of the routed experts have calibrated scales; "
                f"write {EXPERTS} or {EXPERTS}:LAYERS"
            )
        if self.declare_kv not in (None, "nvfp4"):
            raise UserError(f"--declare-kv {self.declare_kv} is unknown; write nvfp4, or leave it out")
        if self.declare_kv and self.format != "nvfp4":
            raise UserError(
                f"--declare-kv {self.declare_kv} needs --format nvfp4: vLLM reads no FP4 KV cache from a {self.format} checkpoint; "
                "leave it out and give vLLM --kv-cache-dtype"
            )
        if self.activations not in (None, "bf16", self.format):
            raise UserError(f"--activations {self.activations} does not go with --format {self.format}; write bf16, or leave it out")

    @property
    def block(self) -> BlockFormat | None:
        """The block format of quantized weights, None for BF16."""
        return None if self.format == "bf16" else block_format(self.format)

    @property
    def rounds_activations(self) -> bool:
        """Whether the engine rounds the experts' inputs (W4A4); W4A16 otherwise."""
        return self.format != "bf16" and self.activations != "bf16"

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites whose static multipliers are written."""
        if self.format == "bf16":
            return ()
        return SITES if self.format == "nvfp4" and self.rounds_activations else KV_SITES

    def quantized_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers whose routed experts are quantized.

        Raises:
          UserError: the scope names layers that the model does not have, or none at all.
        """
        if self.format == "bf16":
            return ()
        _, colon, text = self.scope.partition(":")
        return resolve_layers(_layers(text) if colon else "all", num_layers, "--scope")


def _layers(text: str) -> Any:
    """`2,3` as ids; words of the grammar as they are."""
    ids = [part.strip() for part in text.split(",")]
    if not text:
        raise UserError(f"--scope {EXPERTS}: names no layers; write {EXPERTS}, or {GRAMMAR} behind the colon")
    return [int(part) for part in ids] if all(part.isdecimal() for part in ids) else text
