"""QUADS' compensated products in vLLM: log-probs of an equation in JAX, channels of a ranking in NumPy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels import NVFP4, fake_quant, oracle
from tests import tiny_policy
from tests.rollout_bridge.vllm_plugin import served
from trace_jax.models import layer_scope
from trace_jax.quantization.plan import rollout_plan
from trace_jax.train.objective import ObjectiveSpec, batch_logprobs

pytestmark = served.NEEDS_VLLM

PLAN = rollout_plan("nvfp4", "nvfp4", "bf16", "bf16")
CHANNELS = {"expert_input": np.r_[0:16, 40:56], "down_input": np.arange(8, 24)}
EVERY = {"expert_input": np.arange(64), "down_input": np.arange(32)}


def options(fraction: float) -> dict:
    return {"dtype": "float32", "additional_config": {"trace_jax": {"residual_compensation": {"fraction": fraction}}}}


def named(channels: dict[str, np.ndarray]) -> dict[str, list[int]]:
    """The same channels at every layer, by the names of vLLM's modules."""
    return {
        f"model.layers.{layer}.mlp.experts.routed_experts.{site}": ids.tolist()
        for layer in tiny_policy.LAYERS
        for site, ids in channels.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("residual")
    model = served.export(folder, "model")
    fixed = {"model": model, "prompts": served.prompts()}
    cases = [
        fixed | {"name": "none", "options": options(0.0)},
        fixed | {"name": "half", "options": options(0.5), "channels": named(CHANNELS)},
        fixed | {"name": "all", "options": options(1.0)},
        fixed | {"name": "chosen", "options": options(0.25), "calibrate": served.prompts(), "record": True, "prompts": [[1]], "tokens": 1},
        fixed | {"name": "unchosen", "options": options(0.5)},
    ]
    return folder, served.generate(folder, cases)


def equation(batch, channels: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The trainer's forward with X replaced by Q(X) + Q(R[C]) at both inputs of the experts."""
    original = layer_scope.round_site

    def compensated(site, x, plan, multiplier, **choices):
        rounded, captured = original(site, x, plan, multiplier, **choices)
        if site in channels and channels[site].size:
            left = (x - rounded)[..., channels[site]]
            rounded = rounded.at[..., channels[site]].add(fake_quant(left, NVFP4, multiplier / 4))
        return rounded, captured

    monkeypatch.setattr(layer_scope, "round_site", compensated)
    spec = ObjectiveSpec(replace(tiny_policy.policy("float32"), experts_implementation="ragged"), PLAN)
    forward = jax.jit(lambda masters, scales, batch: batch_logprobs(masters, scales, batch, spec)[0])
    return np.asarray(forward(served.stored_params(), tiny_policy.multipliers(), batch))


@pytest.mark.parametrize(("name", "channels"), [("half", CHANNELS), ("all", EVERY)])
def test_log_probs_are_those_of_the_equation(results, name: str, channels, monkeypatch: pytest.MonkeyPatch):
    found = results[1][name]
    assert found["channels"] == named(channels) and found["capabilities"]["residual_fraction"] == {"half": 0.5, "all": 1.0}[name]
    batch = served.as_batch(served.prompts(), found["answers"])
    gap = tiny_policy.gap(batch, equation(batch, channels, monkeypatch))
    other = {site: ids[:-16] for site, ids in channels.items()}
    wrong = tiny_policy.gap(batch, equation(batch, other, monkeypatch))
    print(served.describe(name, gap), served.describe("  control, one block less", wrong))
    assert gap.max() <= 1e-4 and wrong.mean() > 1e-3


def test_compensation_brings_log_probs_nearer_to_unrounded_activations(results):
    """W4A4 answers against the W4A16 forward, which is what QUADS' trainer computes: the gap shrinks with the share."""
    gaps = []
    for name in ("none", "half", "all"):
        batch = served.as_batch(served.prompts(), results[1][name]["answers"])
        gaps.append(tiny_policy.gap(batch, served.trainer(batch, rollout_plan("nvfp4", "bf16", "bf16", "bf16"), "float32")[0]).mean())
    print("mean gap to W4A16 without, half, all compensated:", *(f"{gap:.4f}" for gap in gaps))
    assert gaps[0] > gaps[1] > gaps[2]


def test_calibration_chooses_the_channels_with_the_largest_residuals(results):
    folder, found = results
    chosen = found["chosen"]["channels"]
    assert set(chosen) == set(named(CHANNELS))
    scales = tiny_policy.multipliers()["expert_input"]
    count = sum(map(len, served.prompts()))
    with np.load(Path(folder) / "chosen.npz") as rows:
        for layer in tiny_policy.LAYERS:
            x = rows[f"expert_input.{layer}.input"][:count]
            left = (x - oracle.fake_quant(x, NVFP4, np.asarray(scales[layer]))).astype(np.float64)
            best = np.sort(np.argsort(-np.sum(left**2, axis=0), kind="stable")[:16])
            name = f"model.layers.{layer}.mlp.experts.routed_experts."
            assert chosen[f"{name}expert_input"] == best.tolist()
            assert len(chosen[f"{name}down_input"]) == 16  # a quarter of 32, in whole blocks


def test_serving_without_a_choice_is_refused(results):
    assert "no channels are chosen; call rollout_bridge.vllm_plugin.channels.calibrate" in results[1]["unchosen"]["error"]
