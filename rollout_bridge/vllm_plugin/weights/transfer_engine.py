"""The weight-transfer engine that vLLM runs under the name "trace_jax". Imports vllm: vLLM imports this module by name."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rollout_bridge.vllm_plugin.weights.errors import WeightsDamaged, WeightsRefused
from rollout_bridge.vllm_plugin.weights.expected import TensorSpec, expected_tensors
from rollout_bridge.vllm_plugin.weights.load_experts import load_experts, stacked_scalars
from rollout_bridge.vllm_plugin.weights.model_layout import model_layout
from rollout_bridge.vllm_plugin.weights.receive import receive_update
from rollout_bridge.vllm_plugin.weights.seconds import seconds
from rollout_bridge.vllm_plugin.weights.shared import SharedTensors
from rollout_bridge.vllm_plugin.weights.staging import StagedUpdate
from rollout_bridge.vllm_plugin.weights.targets import plain_tensors
from rollout_bridge.vllm_plugin.workers import agreed, from_first, of_all, rank_and_size
from rollout_bridge.wire import RingReader


@dataclasses.dataclass
class RingInitInfo:
    """Where updates come from: the path of a ring."""

    ring_path: str


@dataclasses.dataclass
class RingUpdateInfo:
    """Which update to take, and how many seconds the trainer may take to its next record."""

    version: int
    timeout_s: float


class RingWeightTransferEngine(WeightTransferEngine[RingInitInfo, RingUpdateInfo]):
    """Takes an update from a ring and loads it in place, or refuses all of it.

    Attributes:
      in_use: count, checksum and version of the weights in use; None before the first update.
      refused: why the last update was not taken; None if it was.
      timing: of the last update, see `update_timing`.
    """

    init_info_cls = RingInitInfo
    update_info_cls = RingUpdateInfo
    supports_draft_weight_update = False

    in_use: dict[str, Any] | None = None
    refused: str | None = None
    timing: dict[str, Any] | None = None
    _reader: RingReader | None = None
    _ring_path = ""
    _damaged: str | None = None

    def init_transfer_engine(self, init_info: RingInitInfo) -> None:
        """Opens the ring, unless it is open; of several workers only the first reads."""
        if rank_and_size()[0]:
            return
        if self._reader is None or self._ring_path != init_info.ring_path:
            self.shutdown()
            self._reader, self._ring_path = RingReader(Path(init_info.ring_path)), init_info.ring_path

    def start_weight_update(self) -> None:
        """Nothing is prepared before the update has been checked.

        Raises:
          WeightsDamaged: an earlier update failed halfway.
        """
        if self._damaged:
            raise WeightsDamaged(self._damaged)

    def receive_weights(self, update_info: RingUpdateInfo) -> None:
        """Receives, checks and loads a whole update, and zeroes the KV cache; or says in `refused` what is wrong with it, and nothing was
        replaced. Not by an error, whose type would be lost between processes.

        Raises:
          WeightsDamaged: vLLM could not load what was checked, or workers have loaded different tensors.
        """
        layout = model_layout(self.vllm_config, self.model)
        expected = expected_tensors(layout)
        start = seconds()
        staged, problem = self._receive(update_info, expected)
        self.refused = from_first(problem)
        if self.refused:
            return
        received = seconds()
        size = 0 if staged is None else sum(tensor.nbytes for tensor in staged.tensors.values())
        self.in_use = None
        try:
            tensors = SharedTensors(None if staged is None else staged.tensors, expected)
            _forget_prepacked_experts(self.model)
            initialize_layerwise_reload(self.model)
            self.model.load_weights(plain_tensors(tensors, layout.tied))
            with stacked_scalars(self.model):
                load_experts(self.model, tensors)
                finalize_layerwise_reload(self.model, self.model_config)
            loaded = tensors.digest if staged is None else staged
            count, checksum = agreed(of_all((loaded.count, loaded.checksum)), "the weights that they have loaded")
        except BaseException as error:
            self._damaged = f"loading version {update_info.version} failed halfway ({error}); start the engine again"
            raise WeightsDamaged(self._damaged) from error
        _zero_kv_cache(self.vllm_config)
        self.timing = {
            "gb": size / 1e9,
            "receive_s": (received - start).tolist(),
            "check_s": (np.zeros(2) if staged is None else staged.check_s).tolist(),
            "load_s": (seconds() - received).tolist(),
        }
        self.in_use = {"count": count, "checksum": checksum, "version": update_info.version}

    def _receive(self, update_info: RingUpdateInfo, expected: dict[str, TensorSpec]) -> tuple[StagedUpdate | None, str | None]:
        """In the first worker the update, or what is wrong with it; in the others nothing."""
        if rank_and_size()[0]:
            return None, None
        assert self._reader is not None
        try:
            return receive_update(self._reader, update_info.version, update_info.timeout_s, lambda: StagedUpdate(expected)), None
        except WeightsRefused as error:
            return None, str(error)

    def finish_weight_update(self) -> None:
        """Everything is done."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 wants the sender here as well; ours is `rollout_bridge.engine.weights.send`, which needs no vLLM."""
        raise NotImplementedError("the trainer sends through rollout_bridge.engine.weights.send")

    def shutdown(self) -> None:
        """Gives the ring back."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _forget_prepacked_experts(model: torch.nn.Module) -> None:
    """On CPU vLLM packs unquantized experts only while their method has no kernel; with the one that it has, it would read plain
    weights as packed ones."""
    if current_platform.is_cpu():
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedFusedMoEMethod):
                method.moe_kernel = None


def _zero_kv_cache(vllm_config: Any) -> None:
    for layer in vllm_config.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            if tensor is not None:
                tensor.zero_()
