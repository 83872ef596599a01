"""What would run with other numerics than its label is refused in one line, and what vLLM leaves out of a checkpoint is put back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests import tiny_policy
from tests.rollout_bridge.vllm_plugin import served
from tests.tiny_policy import BIASED
from trace_jax.quantization.plan import UNQUANTIZED, rollout_plan

pytestmark = served.NEEDS_VLLM

KV4 = {"trace_jax": {"kv_cache": {"k": "nvfp4", "v": "nvfp4"}}}
PLANS = {
    "declared": rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "biased": rollout_plan("nvfp4", "nvfp4", "nvfp4", "nvfp4"),
    "bf16": UNQUANTIZED,
    "mxfp4": rollout_plan("mxfp4", "mxfp4", "bf16", "bf16"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("refusals")
    models = {
        "declared": served.export(folder, "declared", declare_kv="nvfp4"),
        "biased": served.export(folder, "biased", BIASED),
        "w4a16": served.export(folder, "w4a16", activations="bf16"),
        "bf16": served.export(folder, "bf16", format="bf16"),
        "mxfp4": served.export(folder, "mxfp4", format="mxfp4"),
    }

    def case(name: str, model: str, dtype: str = "float32", config: dict | None = None, **options) -> dict:
        additional = {} if config is None else {"additional_config": config}
        return {"name": name, "model": models[model], "prompts": served.prompts(), "options": {"dtype": dtype, **additional, **options}}

    cases = [
        case("auto", "declared", "bfloat16"),
        case("twice", "declared", "bfloat16", KV4),
        case("declared", "declared", "bfloat16", KV4, kv_cache_dtype="bfloat16"),
        case("biased", "biased", config=KV4),
        case("bf16", "bf16"),
        case("no multipliers", "bf16", config=KV4),
        case("no activations", "w4a16", config={"trace_jax": {"residual_compensation": {"fraction": 0.5}}}),
        case("unknown key", "w4a16", config={"trace_jax": {"kv": "nvfp4"}}),
        case("mxfp4", "mxfp4"),
    ]
    return served.generate(folder, cases)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("auto", "kv_cache_dtype is nvfp4, as the checkpoint declares or you asked, and vLLM cannot read such a cache on CPU"),
        ("twice", "trace-jax rounds k/v itself; pass kv_cache_dtype='bfloat16'"),
        ("no multipliers", "kv_cache k/v nvfp4 needs a checkpoint with the multipliers of K and V"),
        ("no activations", "the checkpoint leaves activations unrounded (W4A16); write 0.0"),
        ("unknown key", "trace_jax has no key 'kv'; the keys are kv_cache, residual_compensation"),
    ],
)
def test_refused_in_one_line(results, name: str, line: str):
    print(results[name]["error"])
    assert line in results[name]["error"] and "\n" not in results[name]["error"]


@pytest.mark.parametrize("name", PLANS)
def test_served_as_declared(results, name: str):
    """FP4 K and V of a declaring checkpoint after the remedy; a bias on the output projection, which vLLM's model lacks; BF16 weights."""
    assert "answers" in results[name], results[name]
    dtype = "bfloat16" if name == "declared" else "float32"
    config = BIASED if name == "biased" else tiny_policy.CONFIG
    batch = served.as_batch(served.prompts(), results[name]["answers"])
    masters = served.stored_params(config)
    if name == "bf16":  # experts in a file are BF16 as well
        masters = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), masters)
    gap = tiny_policy.gap(batch, served.trainer(batch, PLANS[name], dtype, config, masters)[0])
    print(served.describe(name, gap))
    assert gap.max() <= 1e-4 if dtype == "float32" else gap.mean() <= 0.01 and np.quantile(gap, 0.99) <= 0.05
    if name == "biased":
        attention = masters["groups"][0]["attention"]
        without = masters | {"groups": {0: masters["groups"][0] | {"attention": attention | {"o_bias": attention["o_bias"] * 0}}}}
        assert tiny_policy.gap(batch, served.trainer(batch, PLANS[name], dtype, config, without)[0]).mean() > 0.05
