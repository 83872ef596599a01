"""Weight updates: complete, idempotent, without stale state, and equal to what the trainer rounds."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_policy as tiny

from trace_jax.layers.experts import ExpertWeights
from trace_jax.quantization.plan import BLOCK_FORMATS, rollout_plan
from trace_jax.quantization.weights import fake_quant_experts
from trace_jax.rollout import LayerUpdate, UpdateDigest, generate
from trace_jax.rollout.embedded.decode import decode
from trace_jax.rollout.weight_sync import decode_updates, expected_tensors, layer_updates

PLAN = tiny.PLANS["nvfp4"]
POLICY = tiny.policy("float32")


def updates(seed=0, plan=PLAN, policy=POLICY):
    return list(layer_updates(policy, plan, tiny.params(seed), tiny.multipliers(seed)))


def checksum_of(sent):
    digest = UpdateDigest()
    for update in sent:
        digest.add(update)
    return digest.ack(0).checksum


def all_tensors(sent):
    return {name: tensor for update in sent for name, tensor in update.tensors.items()}


@pytest.fixture(scope="module")
def engine():
    return tiny.engine(PLAN, "float32", kind="codes")


def answers(engine):
    return generate(engine, tiny.requests())


def weights_of(engine):
    return jax.device_get((engine._params, engine._multipliers))


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_sync_01_02_13_updates_are_idempotent_and_leave_no_stale_state(engine):
    first = tiny.sync(engine, 0, version=1)
    weights, generated = weights_of(engine), answers(engine)
    again = tiny.sync(engine, 0, version=1)
    assert again == first
    assert_same_bits(weights_of(engine), weights)
    tiny.assert_same_answers(answers(engine), generated)

    other = tiny.sync(engine, 1, version=2)
    assert other.checksum != first.checksum and other.count == first.count
    changed = answers(engine)
    assert not np.array_equal(changed.tokens, generated.tokens)
    assert set(changed.weight_version) == {2} and engine.health().version == 2

    assert tiny.sync(engine, 0, version=3).checksum == first.checksum
    tiny.assert_same_answers(answers(engine), generated)


def test_sync_12_17_answers_after_an_update_are_those_of_a_fresh_engine(engine):
    """The programs compiled before the update serve the new weights, and nothing of the old ones is left in them."""
    tiny.sync(engine, 0)
    answers(engine)
    compiled = decode._cache_size()  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs of jax)
    tiny.sync(engine, 1)
    after = answers(engine)
    assert decode._cache_size() == compiled  # pyright: ignore[reportAttributeAccessIssue]
    tiny.assert_same_answers(after, answers(tiny.engine(PLAN, "float32", kind="codes", seed=1)))
    tiny.sync(engine, 0)


@pytest.mark.parametrize("plan_name", list(tiny.PLANS))
def test_sync_03_first_load_update_and_resume_send_the_same_bytes(plan_name):
    """Masters on the device, masters read back to the host, and masters after another update was sent."""
    plan = tiny.PLANS[plan_name]
    first = checksum_of(updates(plan=plan))
    restored = jax.device_get((tiny.params(), tiny.multipliers()))
    assert checksum_of(layer_updates(POLICY, plan, *restored)) == first
    assert checksum_of(updates(1, plan)) != first
    assert checksum_of(updates(plan=plan)) == first


def test_sync_07_other_multipliers_change_the_answers(engine):
    before = answers(engine)
    louder = {site: value * jnp.float32(2.0**9) for site, value in tiny.multipliers().items()}
    engine.update_weights(layer_updates(POLICY, PLAN, tiny.params(), louder), 1)
    after = answers(engine)
    assert before.logprobs.shape != after.logprobs.shape or np.max(np.abs(before.logprobs - after.logprobs)) > 1e-3
    tiny.sync(engine, 0)
    tiny.assert_same_answers(answers(engine), before)


def test_sync_11_derived_scales_follow_weights_times_four():
    tree = tiny.params()
    group = tree["groups"][0]
    larger = tree | {"groups": {0: group | {"experts": jax.tree.map(lambda w: w * 4, group["experts"])}}}
    plain, scaled = (
        decode_updates(POLICY, PLAN, all_tensors(layer_updates(POLICY, PLAN, p, tiny.multipliers())))[0] for p in (tree, larger)
    )
    for name in ExpertWeights._fields:
        np.testing.assert_array_equal(scaled["groups"][0]["experts"][name], plain["groups"][0]["experts"][name] * 4)


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4", "mxfp4", "nvfp4_4over6"])
def test_the_engine_decodes_what_the_trainer_rounds(weights):
    """Experts equal the trainer's fake quantization bit for bit; everything else is the master in the compute dtype."""
    policy, plan = tiny.policy(), rollout_plan(weights, "bf16", "bf16", "bf16")
    received, multipliers = decode_updates(policy, plan, all_tensors(updates(plan=plan, policy=policy)))
    masters = tiny.params()
    experts = ExpertWeights(**masters["groups"][0]["experts"])
    rounded = jax.jit(functools.partial(fake_quant_experts, fmt=weights))(experts)
    expected = masters | {"groups": {0: masters["groups"][0] | {"experts": rounded._asdict()}}}
    assert_same_bits(received, jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected))
    assert multipliers == {}


def test_kv_01_static_multipliers_are_part_of_every_update():
    """The engine keeps none of its own: after any reload the scales of the KV cache are those of the trainer."""
    sent = all_tensors(updates())
    assert {f"model.layers.{i}.self_attn.{side}_proj.{side}_scale" for i in tiny.LAYERS for side in "kv"} <= sent.keys()
    assert_same_bits(decode_updates(POLICY, PLAN, sent)[1], tiny.multipliers())


def test_sync_16_the_acknowledgement_counts_and_sums_every_tensor(engine):
    sent = updates()
    digest = UpdateDigest()
    ack = engine.update_weights(digest.observe(iter(sent)), 5)
    assert ack == digest.ack(5) and ack.count == len(expected_tensors(POLICY, PLAN)) == len(all_tensors(sent))
    assert ack.checksum == checksum_of(sent) == checksum_of(reversed(sent))
    assert [update.layer_id for update in sent] == [*tiny.LAYERS, None]


@pytest.mark.parametrize("plan_name", list(tiny.PLANS))
def test_sync_04_only_routed_experts_are_quantized(plan_name):
    names = expected_tensors(POLICY, tiny.PLANS[plan_name])
    quantized = {name for name in names if name.endswith(("weight_scale", "weight_scale_2", "weight_packed"))}
    assert all(".mlp.experts." in name for name in quantized)
    assert not [name for name in names if re.search(r"mlp\.gate\.weight_", name)]
    assert names["model.layers.0.mlp.gate.weight"] == ("float32", (tiny.CONFIG.num_experts, tiny.CONFIG.hidden_size))
    assert {dtype for name, (dtype, _) in names.items() if ".mlp.experts." not in name} == {"float32"}
    assert bool(quantized) == (tiny.PLANS[plan_name].weights in BLOCK_FORMATS)


def damaged(how):
    """An update with one thing wrong, and the name that the error must hold."""
    sent = updates(1)
    name = "model.layers.1.mlp.experts.down_proj.weight_scale"
    tensors = dict(sent[1].tensors)
    if how == "missing":
        del tensors[name]
    elif how == "unknown":
        name = "model.layers.1.mlp.experts.mixer.D"
        tensors[name] = jnp.zeros(3)
    elif how == "wrong dtype":
        tensors[name] = tensors[name].astype(jnp.int32)
    elif how == "wrong shape":
        tensors[name] = tensors[name][:-1]
    elif how == "unquantized":
        name = "model.layers.1.mlp.experts.down_proj.weight"
        tensors[name] = tiny.params(1)["groups"][0]["experts"]["down"][1]
    elif how == "duplicate":
        name = "model.norm.weight"
        tensors[name] = sent[-1].tensors[name]
    return [sent[0], replace(sent[1], tensors=tensors), *sent[2:]], name


@pytest.mark.parametrize("how", ["missing", "unknown", "wrong dtype", "wrong shape", "unquantized", "duplicate"])
def test_sync_08_10_a_wrong_tensor_is_named_and_the_old_weights_stay(engine, how):
    tiny.sync(engine, 0, version=7)
    before = weights_of(engine)
    sent, name = damaged(how)
    with pytest.raises(ValueError, match=re.escape(name)):
        engine.update_weights(iter(sent), 8)
    assert_same_bits(weights_of(engine), before)
    assert engine.health().version == 7


def test_sync_06_an_update_without_the_quantize_step_is_refused(engine):
    tiny.sync(engine, 0, version=7)
    sent = updates(1, tiny.PLANS["bf16"])
    with pytest.raises(ValueError, match=r"does not fit the engine in \d+ tensors, first model.layers.0.mlp.experts"):
        engine.update_weights(iter(sent), 8)
    assert engine.health().version == 7


def test_a_stream_that_breaks_off_and_an_empty_one_leave_the_old_weights(engine):
    tiny.sync(engine, 0, version=7)

    def broken():
        yield updates(1)[0]
        raise ConnectionError("trainer died")

    with pytest.raises(ConnectionError):
        engine.update_weights(broken(), 8)
    for sent in ([], [LayerUpdate(None, {})]):
        with pytest.raises(ValueError, match="does not fit"):
            engine.update_weights(iter(sent), 8)
    assert engine.health().version == 7
