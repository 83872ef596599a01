"""Where a policy comes from, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.config.schema import OptimizerConfig
from trace_jax.errors import UserError
from trace_jax.models.hf import save_hf_directory
from trace_jax.rl import Correction, PolicyLoss
from trace_jax.tokenizers import load_tokenizer
from trace_jax.train.checkpoint import Checkpoints, Progress, load_policy
from trace_jax.train.optimizer import make_optimizer
from trace_jax.train.setup import build_setup, calibrated, initial_policy
from trace_jax.train.state import TrainState


@pytest.fixture(scope="module")
def loaded(cold_start):
    return load_policy(cold_start.directory)


@pytest.fixture(scope="module")
def hf_directory(tmp_path_factory, loaded):
    directory = tmp_path_factory.mktemp("hf") / "model"
    save_hf_directory(directory, loaded.policy.family, loaded.policy.config, loaded.params, dtype="float32")
    return directory


def save_policy(directory, loaded, params):
    optimizer = make_optimizer(OptimizerConfig())
    checkpoints = Checkpoints(directory / "checkpoints")
    state = TrainState(params, optimizer.init(params), loaded.multipliers)
    checkpoints.save(state, Progress(step=3), loaded.policy, loaded.tokenizer, {})
    checkpoints.close()


@pytest.mark.parametrize("kind", ["run", "checkpoints", "step"])
def test_a_run_a_folder_of_checkpoints_or_one_step(make_config, cold_start, loaded, kind):
    source = cold_start.directory / {"run": "", "checkpoints": "checkpoints", "step": "checkpoints/60"}[kind]
    setup, params, multipliers = initial_policy(make_config(f"model.source={source}"))
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    jax.tree.map(np.testing.assert_array_equal, multipliers, loaded.multipliers)
    assert setup.policy.config == loaded.policy.config


def test_a_hugging_face_directory(make_config, hf_directory, loaded):
    setup, params, multipliers = initial_policy(make_config(f"model.source={hf_directory}"))
    jax.tree.map(np.testing.assert_array_equal, params, loaded.params)
    assert multipliers == {} and setup.policy.config == loaded.policy.config


def test_a_policy_is_not_trained_on_the_ids_of_another_tokenizer(make_config, cold_start):
    with pytest.raises(UserError) as caught:
        initial_policy(make_config(f"model.source={cold_start.directory}", "tokenizer=byte"))
    assert str(caught.value) == (
        f"the policy of {cold_start.directory} was trained with tokenizer ascii, the config says byte; write tokenizer: ascii"
    )


@pytest.fixture
def trained_with(tmp_path, loaded):
    """`trained_with(folder, text)`: a run whose tokenizer is that folder; its tokenizer.json holds the text."""

    def make(folder, text="{}"):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(text)
        save_policy(tmp_path / "run", dataclasses.replace(loaded, tokenizer=str(folder)), loaded.params)
        return tmp_path / "run"

    return make


def test_tokenizer_folders_are_compared_by_what_they_hold(make_config, tmp_path, monkeypatch, trained_with):
    source, tokens = trained_with(tmp_path / "tokens"), tmp_path / "tokens"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tokens, "copy")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text("[]")
    asked = []  # the folders that are taken are not real tokenizers, so it ends where they are loaded
    monkeypatch.setattr("trace_jax.train.setup.load_tokenizer", lambda spec: asked.append(spec) or load_tokenizer("ascii"))
    for same in (str(tokens), "tokens", "./tokens/", "copy"):
        initial_policy(make_config(f"model.source={source}", f"tokenizer={same}"))
    assert asked == [str(tokens), "tokens", "./tokens/", "copy"]
    for different in ("other", "ascii"):
        with pytest.raises(UserError, match=f"was trained with tokenizer {tokens}, the config says {different}; write tokenizer: {tokens}"):
            initial_policy(make_config(f"model.source={source}", f"tokenizer={different}"))
    tokens.rename(tmp_path / "moved")
    initial_policy(make_config(f"model.source={source}", "tokenizer=moved"))


def test_a_hugging_face_directory_with_a_tokenizer_of_its_own(make_config, hf_directory, tmp_path):
    source = shutil.copytree(hf_directory, tmp_path / "hf")
    initial_policy(make_config(f"model.source={source}"))
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=f"was trained with tokenizer {source}, the config says ascii; write tokenizer: {source}"):
        initial_policy(make_config(f"model.source={source}"))


def test_random_weights_follow_the_seed(make_config):
    first, again, other = (jax.tree.leaves(initial_policy(make_config(f"seed={seed}"))[1]) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_config_that_contradicts_its_source(make_config, cold_start):
    with pytest.raises(UserError, match=r"model\.config\.hidden_size is 64, but the loaded policy has 32"):
        initial_policy(make_config(f"model.source={cold_start.directory}", "model.config.hidden_size=64"))


def test_a_vocabulary_smaller_than_the_tokenizer(make_config):
    with pytest.raises(UserError, match=r"vocab_size=100 of model\.config is smaller than the 131 tokens of tokenizer 'ascii'; raise it"):
        build_setup(make_config("model.config.vocab_size=100"))
    setup = build_setup(make_config())
    loaded = (setup.policy.family, dataclasses.replace(setup.policy.config, vocab_size=100))
    with pytest.raises(UserError, match=r"vocab_size=100 of the loaded policy .*; choose the tokenizer the policy was trained with"):
        build_setup(make_config("model.config={}", "model.source=elsewhere"), loaded)


def test_a_source_without_a_checkpoint(make_config, tmp_path):
    with pytest.raises(UserError, match="no such file or directory"):
        initial_policy(make_config(f"model.source={tmp_path}/absent"))
    with pytest.raises(UserError, match="neither a run directory"):
        initial_policy(make_config(f"model.source={tmp_path}"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint"):
        initial_policy(make_config(f"model.source={tmp_path}"))
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_step_that_does_not_exist(make_config, cold_start):
    with pytest.raises(UserError, match="checkpoints/61"):
        initial_policy(make_config(f"model.source={cold_start.directory}/checkpoints/61"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_named(make_config, loaded, tmp_path, bad):
    params = loaded.params | {"final_norm": loaded.params["final_norm"].at[3].set(bad)}
    save_policy(tmp_path, loaded, params)
    with pytest.raises(UserError, match="final_norm"):
        initial_policy(make_config(f"model.source={tmp_path}"))


def test_calibration_is_positive_and_follows_the_headroom(make_config, cold_start):
    setup, params, _ = initial_policy(make_config(f"model.source={cold_start.directory}"))
    found = calibrated(setup, params)
    wider, _, _ = initial_policy(make_config(f"model.source={cold_start.directory}", "calibration.headroom=6.0"))
    for site, values in calibrated(wider, params).items():
        assert values.shape == (2,) and values.dtype == jnp.float32
        np.testing.assert_allclose(np.log2(values / found[site]), 2.0, atol=0.1)  # from 1.5 to 6


def test_longest_sequence_ignores_empty_splits(make_config):
    setup = build_setup(make_config("task.params={min_word_len: 3, max_word_len: 3, size: 3}"))
    assert 0 in setup.task.sizes.values()
    longest = max(
        len(setup.tokenizer.apply_prompt(row.prompt)) for split, size in setup.task.sizes.items() if size for row in setup.task.rows(split)
    )
    assert setup.max_sequence_tokens() == longest + 6


def test_the_algorithm_reaches_the_update(make_config):
    def updates(*overrides):
        setup = build_setup(make_config(*overrides))
        setup.task.close()
        return setup.updates(32)

    default = updates()
    assert default.spec.loss == PolicyLoss("ppo_clip", "token", clip_low=0.2, clip_high=0.28, clip_c=None)
    assert default.spec.correction == Correction("tis", "token", cap=5.0, low=0.5)
    assert (default.aggregation, default.max_length, default.replay) == ("token_mean", 32, True)
    band = updates("algorithm.name=trust_band", "algorithm.correction={kind: icepop, low: 0.25}", "algorithm.routing_replay=false")
    assert band.spec.loss == PolicyLoss("ppo_clip", "geometric", clip_low=3e-4, clip_high=4e-4, clip_c=1.0007)
    assert band.spec.correction == Correction("icepop", "geometric", cap=2.0, low=0.25)
    assert (band.aggregation, band.replay) == ("seq_mean_token_mean", False)
    assert updates("algorithm.name=cispo").spec.loss == PolicyLoss("cispo", "token", clip_low=1.0, clip_high=5.0)
    # The constant of Dr. GRPO: the longest answer, here of 6 tokens, or what is written.
    assert updates("algorithm.name=dr_grpo").loss_scale_factor == 6
    assert updates("algorithm.name=dr_grpo", "algorithm.loss_scale_factor=99").loss_scale_factor == 99
