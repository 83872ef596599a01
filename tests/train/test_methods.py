"""Two steps of a real run under every method: what is recorded, what the trainer follows, and what it reports.

The tiny policy computes in float32, so the engine and a trainer that rounds like it agree to the last digits, and every gap
that remains comes from the method.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from tests.selection import slow_but
from trace_jax.config.presets import METHODS
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train import setup
from trace_jax.train.checkpoint import load_policy
from trace_jax.train.read_checkpoint import read_meta, restore_channels
from trace_jax.train.run import run_training

FP8 = ("rollout.weights=fp8", "rollout.activations=fp8", "rollout.kv_cache.k=fp8", "rollout.kv_cache.v=fp8")
CASES: dict[str, tuple[str, ...]] = {
    **{method: (f"method={method}",) for method in METHODS},
    "fp8 naive": ("method=naive", *FP8),
    "w4a8": ("method=qat", "rollout.activations=fp8"),
    "mxfp4 quads": ("method=quads", *(f"rollout.{key}=mxfp4" for key in ("weights", "activations", "kv_cache.k", "kv_cache.v"))),
    "not compensated": ("method=quads", "rollout.residual_compensation.fraction=0.0"),
    "per_token": ("method=trace", "rollout.activation_scale=per_token"),
    "stale batch": ("method=trace", "train.updates_per_batch=2", "sync.max_staleness=1"),
    "rare sync": ("method=trace", "sync.every=2", "sync.max_staleness=1"),
}
QUICK = ("bf16", "quads", "trace")
SHORT = ("steps=2", "eval.every=0", "guidance.audit.every=0", "train.unguided_every=1")

ONE_BIT = {"expert_input": 32 // 8 + 32 // 16, "k": 16 // 8 + 16 // 16, "v": 16 // 8 + 16 // 16}
"""Bytes of a token at one layer: width 32, one KV head of 16; bits and E4M3 scales of NVFP4 blocks."""
BYTES = {
    "trace": ONE_BIT,  # the latter of two layers
    "trace_scales": {"expert_input": 2, "k": 1, "v": 1},
    "trace_full": {"expert_input": 2 * (16 + 2), "k": 2 * (8 + 1), "v": 2 * (8 + 1)},
    "per_token": {site: size + 4 for site, size in ONE_BIT.items()},  # a float32 multiplier each
    "stale batch": ONE_BIT,
    "rare sync": ONE_BIT,
}
EXACT = set(CASES) - {"naive", "fp8 naive", "stale batch", "qat_w4a16", "quads", "mxfp4 quads", "not compensated"}
"""Cases whose trainer has the rollout's weights in the first step and rounds what the rollout rounded."""


class Run(NamedTuple):
    directory: Path
    steps: list[dict[str, Any]]

    def versions(self, step: int) -> set[int]:
        """Weight versions of the tokens drawn in a step."""
        rows = (self.directory / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
        return {version for row in rows for version in json.loads(row)["weight_version"]}


@pytest.fixture(scope="module")
def run_of(make_config, cold_start, tmp_path_factory):
    """`run_of(case)`: the finished run of a case; each runs once."""
    runs: dict[str, Run] = {}

    def run(case: str) -> Run:
        if case not in runs:
            directory = tmp_path_factory.mktemp("run")
            run_training(make_config(f"model.source={cold_start.directory}", *CASES[case], *SHORT), directory)
            runs[case] = Run(directory, [row for row in read_metrics(directory) if row["step"]])
        return runs[case]

    return run


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_two_steps_train(run_of, case):
    run = run_of(case)
    assert [row["step"] for row in run.steps] == [1, 2]
    for row in run.steps:
        assert np.isfinite([row["loss"], row["grad_norm"], row["policy/entropy"]]).all() and row["grad_norm"] > 0
        assert row["train/skipped_updates"] == 0
    before, after = (jax.tree.leaves(load_policy(run.directory / "checkpoints" / step).params) for step in ("0", "2"))
    assert all(np.any(np.asarray(a) != np.asarray(b)) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_the_record_holds_what_the_method_keeps(run_of, case):
    names = {name for name in run_of(case).steps[0] if name.startswith("guidance/")}
    if case not in BYTES:
        assert not names
        return
    for row in run_of(case).steps:
        sizes = {site: row[f"guidance/bytes_per_token/{site}"] for site in ("expert_input", "k", "v")}
        assert sizes == BYTES[case]
        others = sum(row[f"guidance/bytes_per_token/{part}"] for part in ("rows", "constants"))
        assert row["guidance/bytes_per_token"] == pytest.approx(sum(sizes.values()) + others)
        assert row["guidance/missing_fraction"] == 0
    # Under the rollout's scales alone there is no recorded bit to agree with.
    assert ("guidance/parity_agreement" in names) == (case != "trace_scales")


@pytest.mark.parametrize("case", slow_but(QUICK, sorted(EXACT)))
def test_a_trainer_that_rounds_like_the_rollout_has_its_log_probs(run_of, case):
    first = run_of(case).steps[0]
    assert first["train_rollout_logprob_abs_diff_max"] <= 1e-4 and first["rollout_corr/k3_kl"] <= 1e-8
    assert first["router/agreement"] == 1
    guided = case in BYTES
    assert ("unguided/rollout_corr/k3_kl" in first) == guided
    if guided:
        assert first.get("guidance/parity_agreement", 1.0) > 0.999
        assert first["unguided/train_rollout_logprob_abs_diff_max"] <= 1e-4  # its own rounding, in the same float32


@pytest.mark.parametrize(
    ("naive", "quantized"),
    [
        ("naive", ("qat", "trace")),
        pytest.param("naive", ("trace_scales", "trace_full"), marks=pytest.mark.slow),
        pytest.param("fp8 naive", ("fp8",), marks=pytest.mark.slow),
    ],
)
def test_an_unquantized_trainer_is_far_from_the_rollout(run_of, naive, quantized):
    """All start from one policy, so the first step compares the trainers on the very same answers."""
    gap = run_of(naive).steps[0]
    for case in quantized:
        closer = run_of(case).steps[0]
        assert closer["response/length_mean"] == gap["response/length_mean"] and closer["reward/mean"] == gap["reward/mean"]
        for name in ("train_rollout_logprob_abs_diff", "rollout_corr/k3_kl", "rollout_corr/log_ppl_abs_diff"):
            assert closer[name] < 0.05 * gap[name], (case, name)


@pytest.mark.slow
def test_fp8_is_finer_than_fp4(run_of):
    assert run_of("fp8 naive").steps[0]["rollout_corr/k3_kl"] < 0.2 * run_of("naive").steps[0]["rollout_corr/k3_kl"]


@pytest.mark.slow
def test_two_updates_on_one_batch_are_one_version_apart(run_of):
    """Version 0 serves the first batch and both its updates; every update is synced."""
    run = run_of("stale batch")
    assert [row["sync/staleness"] for row in run.steps] == [1, 1]
    assert [row["sync/version"] for row in run.steps] == [2, 4]
    assert [run.versions(step) for step in (1, 2)] == [{0}, {2}]


@pytest.mark.slow
def test_a_rare_sync_leaves_the_engine_behind(run_of):
    run = run_of("rare sync")
    assert [row["sync/staleness"] for row in run.steps] == [0, 1]
    assert [row["sync/version"] for row in run.steps] == [0, 2]
    assert [run.versions(step) for step in (1, 2)] == [{0}, {0}]
    # The second step trains on answers of older weights: the gap is no longer rounding.
    assert run.steps[1]["train_rollout_logprob_abs_diff"] > 100 * run.steps[0]["train_rollout_logprob_abs_diff"]


def test_a_resumed_run_compensates_the_same_channels(run_of, tmp_path, monkeypatch, make_config, cold_start):
    """From the first checkpoint on: the answers are those of the first time, and nobody chooses anew."""
    run = run_of("quads")
    copy = shutil.copytree(run.directory, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints" / "2")
    monkeypatch.setattr(setup, "choose_channels", lambda *_: pytest.fail("channels were chosen anew"))
    run_training(make_config(f"model.source={cold_start.directory}", *CASES["quads"], *SHORT), copy, resume=True)
    for step in (1, 2):
        name = f"step_{step:06d}.jsonl"
        assert (copy / "rollouts" / name).read_bytes() == (run.directory / "rollouts" / name).read_bytes()
    stored = [restore_channels(read_meta(folder / "checkpoints" / step)) for folder in (run.directory, copy) for step in ("0", "2")]
    for channels in stored:
        assert {site: ids.shape for site, ids in channels.items()} == {"expert_input": (2, 16), "down_input": (2, 16)}
        assert all(np.array_equal(ids, stored[0][site]) for site, ids in channels.items())


@pytest.mark.slow
def test_compensation_brings_the_rollout_nearer_to_unrounded_inputs(run_of):
    gaps = [run_of(case).steps[0]["train_rollout_logprob_abs_diff"] for case in ("quads", "not compensated")]
    assert 1e-4 < gaps[0] < 0.9 * gaps[1]


def test_an_engine_in_step_serves_every_version(run_of):
    run = run_of("trace")
    assert [row["sync/staleness"] for row in run.steps] == [0, 0]
    assert [run.versions(step) for step in (1, 2)] == [{0}, {1}]
    assert run.steps[1]["train_rollout_logprob_abs_diff_max"] <= 1e-4
