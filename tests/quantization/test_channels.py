"""Which channels are compensated: the ranking by residuals, what counts for it, and the weights that the longer inputs meet."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from pallas_kernels import NVFP4, oracle
from trace_jax.errors import UserError
from trace_jax.quantization.calibration import _padded_batches, _residual_energy, choose_channels, site_sizes
from trace_jax.quantization.channels import channel_counts, largest_channels, with_channel_columns
from trace_jax.quantization.plan import UNQUANTIZED, SitePlan, rollout_plan

PLAN = replace(tiny.PLANS["nvfp4"], weights="bf16", k=SitePlan(), v=SitePlan())
RAGGED = replace(tiny.policy("float32"), experts_implementation="ragged")
SEQUENCES = [[5, 9, 2, 41, 7, 7], [3], [60, 1, 12]]


@pytest.fixture(scope="module")
def batch():
    """(tokens, segments) of the sequences, [16, 8]."""
    (found,) = _padded_batches(SEQUENCES)
    return found


def energy(tokens, segments, masters=None):
    found = _residual_energy(
        masters or tiny.params(), tiny.multipliers(), jnp.asarray(tokens), jnp.asarray(segments), policy=RAGGED, plan=PLAN
    )
    return {site: np.asarray(found[site]) for site in ("expert_input", "down_input")}


def test_every_sequence_is_there_once(batch):
    tokens, segments = batch
    assert tokens.shape == (16, 8) and sorted(row[mark > 0].tolist() for row, mark in zip(tokens, segments, strict=True))[13:] == sorted(
        SEQUENCES
    )


def test_padding_leaves_no_residual(batch):
    tokens, segments = batch
    plain = energy(tokens, segments)
    jax.tree.map(np.testing.assert_array_equal, energy(np.where(segments, tokens, 77), segments), plain)
    other = energy(np.where(tokens == 41, 42, tokens), segments)
    assert all(np.any(other[site] != plain[site]) for site in plain)


def test_energy_is_the_oracle_s(batch):
    """Of the expert input in the first layer, whose values do not depend on any rounding before it."""
    tokens, segments = batch
    options = RAGGED.options(UNQUANTIZED, observe="values")
    inputs = tiny_inputs(tokens, segments)
    values = np.asarray(RAGGED.forward(tiny.params(), inputs, options).observed["expert_input"].before[0])[segments > 0]
    left = values - oracle.fake_quant(values, NVFP4, np.asarray(tiny.multipliers()["expert_input"][0]))
    np.testing.assert_allclose(energy(tokens, segments)["expert_input"][0], (left**2).sum(axis=0), rtol=0.02, atol=1e-6)


def tiny_inputs(tokens, segments):
    from trace_jax.quantization.calibration import _inputs

    return _inputs(jnp.asarray(tokens), jnp.asarray(segments), {})


def test_the_down_input_counts_for_the_experts_that_a_token_uses(batch):
    """One token uses two of the six experts: only theirs can move its residuals."""
    tokens, segments = (np.where(np.arange(16)[:, None] == 0, part, 0) for part in batch)
    assert segments.sum() == 1
    plain, moved = energy(tokens, segments)["down_input"][0], 0
    experts = tiny.params()["groups"][0]["experts"]
    for expert in range(6):
        masters = tiny.params() | {
            "groups": {0: tiny.params()["groups"][0] | {"experts": experts | {"up": experts["up"].at[0, expert].multiply(1.3)}}}
        }
        moved += bool(np.any(energy(tokens, segments, masters)["down_input"][0] != plain))
    assert moved == 2


def test_the_largest_channels_of_each_layer():
    values = np.zeros((2, 64))
    values[0, [3, 63]], values[1, 40:] = 5.0, 1.0
    assert largest_channels(values, 4).tolist() == [[0, 1, 3, 63], [40, 41, 42, 43]]


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, {}), (0.01, (16, 16)), (0.5, (32, 16)), (0.51, (48, 32)), (1.0, (64, 32))])
def test_a_share_is_whole_blocks(fraction, expected):
    found = channel_counts(site_sizes(tiny.policy()), PLAN, fraction)
    assert found == (dict(zip(("expert_input", "down_input"), expected, strict=True)) if expected else {})
    assert not expected or channel_counts({"expert_input": 64}, rollout_plan("mxfp4", "mxfp4", "bf16", "bf16"), 0.1) == {"expert_input": 32}


def test_a_share_that_is_whole_blocks_gets_no_further_one():
    """0.07 * 1600 is 112.00000000000001 in floating point, and 112 seven blocks of 16."""
    assert channel_counts({"expert_input": 1600}, PLAN, 0.07) == {"expert_input": 112}


def test_all_or_nothing_needs_no_sequences_and_a_choice_does():
    arguments = (tiny.policy(), PLAN, tiny.params(), tiny.multipliers(), [[]])
    assert choose_channels(*arguments, 0.0) == {}
    everything = choose_channels(*arguments, 1.0)
    assert everything["down_input"].tolist() == [list(range(32))] * 3
    with pytest.raises(UserError, match="no prompts"):
        choose_channels(*arguments, 0.5)


def test_weights_have_the_columns_of_their_own_layer_once_more():
    rng = np.random.default_rng(3)
    channels = {
        site: np.stack([np.sort(rng.choice(size, 16, replace=False)) for _ in range(3)]).astype(np.int32)
        for site, size in site_sizes(tiny.policy()).items()
    }
    longer = with_channel_columns(tiny.params(), channels, stacks=tiny.CONFIG.stacks)["groups"][0]["experts"]
    for name, site in (("gate", "expert_input"), ("up", "expert_input"), ("down", "down_input")):
        weight = np.asarray(tiny.params()["groups"][0]["experts"][name])
        columns = np.stack([layer[..., ids] for layer, ids in zip(weight, channels[site], strict=True)])
        np.testing.assert_array_equal(longer[name], np.concatenate([weight, columns], axis=-1))
