"""vLLM on CPU serves other families than Qwen3-MoE: our own checkpoints, and their NVFP4 exports, with the trainer's log-probs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_policy
from tests.exported_policy import save
from tests.model_families import config_of
from tests.rollout_bridge.vllm_plugin import served
from tests.rollout_bridge.vllm_plugin.test_generation import trajectories
from trace_jax.models.hf import save_hf_directory
from trace_jax.models.registry import ModelConfig, Params
from trace_jax.quantization.plan import UNQUANTIZED, rollout_plan
from trace_jax.train.batches import make_batch

pytestmark = [*served.NEEDS_VLLM, pytest.mark.slow]

CONFIGS = {
    "olmoe": config_of("olmoe", hidden_size=128, head_dim=32),  # its files state no head_dim, and vLLM wants 32 on CPU
    "mixtral": config_of("mixtral", hidden_size=64, head_dim=32),
    "qwen3": config_of("qwen3", hidden_size=64, head_dim=32),
    "llama": config_of("llama", hidden_size=64, head_dim=32),
}
CASES = [(kind, name) for name, config in CONFIGS.items() for kind in ("plain", "w4a4") if kind == "plain" or config.moe_layer_ids]
PLANS = {"plain": UNQUANTIZED, "w4a4": rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")}


def as_stored(config: ModelConfig) -> Params:
    """The policy as an export holds it: everything outside the experts in BF16."""

    def stored(path: Any, leaf: jax.Array) -> jax.Array:
        experts = any(getattr(key, "key", None) == "experts" for key in path)
        return leaf if experts else leaf.astype(jnp.bfloat16).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(stored, tiny_policy.params(0, config))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder, cases = tmp_path_factory.mktemp("families"), []
    for name, config in CONFIGS.items():
        params = tiny_policy.params(0, config)
        save_hf_directory(folder / name, name, config, jax.tree.map(np.asarray, params), dtype="float32")
        if config.moe_layer_ids:
            save(folder / f"{name}-run", params, dict(tiny_policy.multipliers(0, config)), config)
            served.export_checkpoint(folder / f"{name}-run", folder / f"{name}-w4a4", served.ExportSettings("nvfp4"), verify=True)
    for kind, name in CASES:
        model = folder / (name if kind == "plain" else f"{name}-w4a4")
        cases.append({"name": f"{kind}-{name}", "model": str(model), "prompts": served.prompts(4), "options": {"dtype": "float32"}})
    return served.generate(folder, cases)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_log_probs_are_the_trainer_s(results, name: str, kind: str) -> None:
    config, answers = CONFIGS[name], results[f"{kind}-{name}"]["answers"]
    batch = make_batch(trajectories(served.prompts(4), answers), [[row] for row in range(4)], 48, 4, num_layers=config.num_layers)[0]
    masters = {"plain": tiny_policy.params(0, config), "w4a4": as_stored(config)}[kind]
    scales, other = tiny_policy.multipliers(0, config), rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4")
    gap, control = (
        tiny_policy.gap(batch, served.trainer(batch, plan, "float32", config, masters, scales)[0]) for plan in (PLANS[kind], other)
    )
    print(served.describe(f"{kind} {name}", gap))
    assert gap.max() <= 1e-4 and control.mean() > 1e-3
