"""vLLM as a generator: one `LLM` in this process, stepped by the server. Imports vllm, so only a worker imports this module."""

from __future__ import annotations

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported

from collections.abc import Iterable, Mapping, Sequence  # noqa: E402
from typing import Any  # noqa: E402

import vllm  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

from rollout_bridge.vllm_plugin.capabilities import capabilities  # noqa: E402
from rollout_bridge.vllm_plugin.capture import set_version, start_capture, stop_capture  # noqa: E402
from rollout_bridge.vllm_plugin.capture.requests import EXTRA  # noqa: E402
from rollout_bridge.vllm_plugin.channels import set_site_channels  # noqa: E402
from rollout_bridge.vllm_plugin.plugin import register  # noqa: E402
from rollout_bridge.vllm_plugin.serve.arguments import FIXED  # noqa: E402
from rollout_bridge.vllm_plugin.serve.channel import Message  # noqa: E402
from rollout_bridge.vllm_plugin.serve.generator import Drawn  # noqa: E402
from rollout_bridge.vllm_plugin.weights import update_weights  # noqa: E402
from rollout_bridge.vllm_plugin.workers import nothing, survive_sigterm  # noqa: E402

CPU_KV_CACHE_BYTES = 1 << 30
"""KV cache on CPU where nothing else is asked for: vLLM would take most of the machine's memory."""

LARGEST_SAMPLE_ID = 1 << 63
"""Ids from here on travel as text in `extra_args`, which holds signed integers."""


class VllmGenerator:
    """Implements `serve.generator.Generator`.

    Args:
      start: the trainer's `start` message: `arguments` of `vllm.LLM` beside the fixed ones, and `capture`: None, or the `rings` that
        take the records, one for each worker, and the `plan` (`vllm_plugin.capture`).

    Raises:
      Exception: whatever vLLM says about a version, model or setting that it does not take.
    """

    def __init__(self, start: Message):
        register()  # also where no entry point names the plugin, as in the trainer's own process
        arguments: dict[str, Any] = {**FIXED, **start["arguments"]}
        self._workers = arguments["tensor_parallel_size"]
        if current_platform.is_cpu():
            arguments.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
            if self._workers > 1:  # vLLM binds each worker to the cores of a memory node of its own, which few machines have
                os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self._llm = LLM(**arguments)
        if self._workers > 1:
            self._llm.collective_rpc(survive_sigterm)
        self._engine = self._llm.llm_engine
        if start["capture"] is not None:
            start_capture(self._llm, start["capture"]["rings"], start["capture"]["plan"])
        self._vocabulary = self._llm.model_config.get_vocab_size()

    def add(self, request: Mapping[str, Any]) -> None:
        """Hands a request to vLLM under its number."""
        sample = request["sample"]
        parameters = SamplingParams(
            temperature=request["temperature"],
            top_p=request["top_p"],
            top_k=request["top_k"],
            seed=request["seed"],
            max_tokens=request["max_new_tokens"],
            # vLLM refuses ids beyond the vocabulary, which cannot be drawn anyway.
            stop_token_ids=[token for token in request["stop_token_ids"] if token < self._vocabulary],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={EXTRA: [sample if sample < LARGEST_SAMPLE_ID else str(sample), request["attempt"], request["audit"]]},
        )
        self._engine.add_request(str(request["id"]), {"prompt_token_ids": request["tokens"]}, parameters)

    def abort(self, ids: Iterable[int]) -> None:
        """Forgets requests that are running."""
        self._engine.abort_request([str(number) for number in ids])

    def step(self) -> list[Drawn]:
        """One step of vLLM's engine."""
        drawn = []
        try:
            outputs = self._engine.step()
        except RuntimeError as error:
            if str(error) == "cancelled":  # all that vLLM says where a process is gone
                raise RuntimeError("one of vLLM's tensor-parallel processes has ended") from error
            raise
        for output in outputs:
            (part,) = output.outputs
            tokens = list(part.token_ids)
            logprobs = [entry[token].logprob for entry, token in zip(part.logprobs or [], tokens, strict=True)]
            drawn.append(Drawn(int(output.request_id), tokens, logprobs, part.finish_reason))
        if self._workers > 1:
            self._llm.collective_rpc(nothing)  # vLLM waits for the first worker only, and the rows of all must be in their rings
        return drawn

    def update_weights(self, ring: str, version: int) -> dict[str, Any]:
        """New weights from a ring, in place."""
        acknowledged = update_weights(self._llm, ring, version)
        set_version(self._llm, version)
        return acknowledged

    def compensate(self, channels: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """The channels of residual compensation."""
        set_site_channels(self._llm, channels)

    def capabilities(self) -> dict[str, Any]:
        """The formats that really execute."""
        return capabilities(self._llm)

    def facts(self) -> dict[str, Any]:
        """What the trainer should know of the model."""
        divided = f", {self._workers} tensor-parallel workers" if self._workers > 1 else ""
        return {"engine": f"vllm {vllm.__version__}{divided}", "max_model_len": self._llm.model_config.max_model_len}

    def close(self) -> None:
        """Ends the capture; memory goes with the process."""
        stop_capture(self._llm)
