"""From a setup to the arguments, the blank checkpoint and the refusals of a vLLM engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_policy as tiny

from rollout_bridge.engine.blank_checkpoint import write_blank_checkpoint
from rollout_bridge.engine.factory import engine_arguments, export_settings, make, slot_bytes
from rollout_bridge.engine.parallel import require_divisible
from rollout_bridge.export.decode import ExportedFiles
from rollout_bridge.export.layout import tensor_plan
from rollout_bridge.vllm_plugin.serve.arguments import FIXED
from tests.rollout_bridge.engine.tiny_setup import W4A4KV4, tiny_setup
from trace_jax.errors import UserError
from trace_jax.quantization.plan import QuantPlan, rollout_plan

pytestmark = pytest.mark.usefixtures("installed")


@pytest.mark.parametrize(
    "plan",
    [
        W4A4KV4,
        rollout_plan("nvfp4", "bf16", "nvfp4", "bf16"),
        rollout_plan("mxfp4", "mxfp4", "bf16", "bf16"),
        rollout_plan("bf16", "bf16", "bf16", "bf16"),
    ],
    ids=["W4A4KV4", "W4A16", "mxfp4", "bf16"],
)
def test_the_blank_checkpoint_is_an_export_without_weights(tmp_path: Path, plan: QuantPlan):
    setup, settings = tiny_setup(plan=plan), export_settings(plan)
    folder = write_blank_checkpoint(tmp_path / "model", setup.policy, settings)
    files = ExportedFiles(folder)
    for spec in tensor_plan(setup.policy, settings):
        values = files.read(spec.name)
        assert values.shape == spec.shape and (values.astype("float32") == (1.0 if spec.dtype == "F32" else 0.0)).all(), spec
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen3_moe"
    if plan.weights == "bf16":
        assert "quantization_config" not in config
    else:
        inputs = config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
        assert (inputs is None) is (plan.expert_input.format == "bf16") is (settings.activations == "bf16")


def test_arguments_follow_the_config():
    arguments = engine_arguments(tiny_setup())
    assert arguments["dtype"] == "float32" and arguments["max_model_len"] == 128 and not set(arguments) & {*FIXED, "max_num_seqs"}
    assert arguments["additional_config"]["trace_jax"]["kv_cache"] == {"k": "nvfp4", "v": "nvfp4"}
    chosen = tiny_setup(
        "rollout.max_batch=8", "rollout.vllm.kv_cache_gib=0.5", "rollout.vllm.engine_args={max_model_len: 64, block_size: 32}"
    )
    assert engine_arguments(chosen) | {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**29, "max_model_len": 64, "block_size": 32} == (
        engine_arguments(chosen)
    )


def test_workers_of_one_model_are_processes_of_vllm_s():
    arguments = engine_arguments(tiny_setup("rollout.vllm.tensor_parallel=2"))
    assert (arguments["tensor_parallel_size"], arguments["distributed_executor_backend"]) == (2, "mp")
    alone = engine_arguments(tiny_setup())
    assert alone["tensor_parallel_size"] == 1 and "distributed_executor_backend" not in alone


@pytest.mark.parametrize(
    ("workers", "overrides", "changes", "message"),
    [
        (3, (), {}, "tensor_parallel is 3 and the model has 4 heads and 2 KV heads; write a number that divides both"),
        (4, (), {}, "tensor_parallel is 4 and experts have 32 hidden values in blocks of 16, one of which would lie in two workers"),
        (2, (), {"expert_hidden_size": 48}, "tensor_parallel is 2 and experts have 48 hidden values in blocks of 16"),
        (2, ("rollout.vllm.mode=in_process",), {}, "tensor_parallel is 2 and rollout.vllm.mode in_process; write mode: process"),
        (2, ("rollout.residual_compensation.fraction=0.5",), {}, "channels are compensated, whose blocks would lie in two workers"),
        (2, (), {"num_kv_heads": 1}, None),  # each worker gets a copy of the head
        (2, (), {}, None),
    ],
)
def test_what_cannot_be_divided_is_refused(workers: int, overrides: tuple[str, ...], changes: dict[str, int], message: str | None):
    setup = tiny_setup(f"rollout.vllm.tensor_parallel={workers}", *overrides)
    setup = replace(setup, policy=replace(setup.policy, config=replace(tiny.CONFIG, **changes)))
    if message is None:
        require_divisible(setup)
        return
    with pytest.raises(UserError, match=message):
        require_divisible(setup)


@pytest.mark.parametrize("name", ["enforce_eager", "dtype", "model"])
def test_arguments_of_the_engine_s_own_are_refused(name: str):
    with pytest.raises(UserError, match=f"rollout.vllm.engine_args.{name} is set by the engine or by another key of rollout; remove it"):
        engine_arguments(tiny_setup(f"rollout.vllm.engine_args={{{name}: 1}}"))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (rollout_plan("nvfp4", "fp8", "bf16", "bf16"), "rollout.weights is nvfp4 and rollout.activations fp8; write one of these"),
        (rollout_plan("mxfp4", "nvfp4", "bf16", "bf16"), "rollout.weights is mxfp4 and rollout.activations nvfp4"),
        (rollout_plan("nvfp4", "nvfp4", "bf16", "fp8"), "keeps K and V in nvfp4 or bf16 beside nvfp4 weights; rollout.kv_cache.v is fp8"),
        (rollout_plan("mxfp4", "mxfp4", "nvfp4", "bf16"), "keeps K and V in bf16 beside mxfp4 weights; rollout.kv_cache.k is nvfp4"),
        (rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4", per_token=True), "activation_scale is per_token"),
    ],
)
def test_formats_that_vllm_does_not_serve(plan: QuantPlan, message: str):
    with pytest.raises(UserError, match=message):
        make(tiny_setup(plan=plan))


def test_compensation_is_an_argument():
    setup = tiny_setup("rollout.residual_compensation.fraction=0.5")
    assert engine_arguments(setup)["additional_config"]["trace_jax"]["residual_compensation"] == {"fraction": 0.5, "selection": "l2"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.activations=bf16", "rollout.activations is bf16 and only nvfp4 and mxfp4 are compensated; write 0.0"),
        ("train_quant.activations=guided", "a record has no residual; write activations: rtn, or none"),
    ],
)
def test_compensation_of_what_it_does_not_go_with(override: str, message: str):
    with pytest.raises(UserError, match=message):
        tiny_setup("rollout.residual_compensation.fraction=0.5", override)


def test_a_slot_holds_a_layer_of_a_small_model():
    size = slot_bytes(tiny_setup())
    assert 30_000 < size < 200_000


def test_a_worker_that_does_not_start_leaves_its_log_and_nothing_else(tmp_path: Path):
    """This interpreter has no vLLM; a run that does not start leaves nothing in its own folder, but says where its log is."""
    with pytest.raises(UserError, match=r"did not start: no vLLM is installed .*; see .*/trace-jax-vllm-\w+\.log\)") as error:
        make(tiny_setup(f"rollout.vllm.python={sys.executable}", directory=tmp_path))
    log = Path(str(error.value).rpartition("see ")[2].rstrip(")"))
    assert "no vLLM is installed" in log.read_text()
    log.unlink()
