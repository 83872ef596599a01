import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trace_jax.metrics import combine, finalize
from trace_jax.rl import PolicyLoss, normalized, policy_loss_sum, token_count

LN = np.log
# Two sequences, three tokens, one padded token that holds garbage. Ratios exp(logp - logp_old):
LOGP = jnp.array([[LN(1.5), LN(0.5), 0.0], [LN(1.5), LN(0.5), jnp.nan]], jnp.float32)
LOGP_OLD = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.0, jnp.inf]], jnp.float32)
MASK = jnp.array([[True, True, True], [True, True, False]])
ADVANTAGES = jnp.array([2.0, -1.0], jnp.float32)
# PPO (arXiv 1707.06347) eq. 7 with clip 0.2 / 0.28 (DAPO, arXiv 2503.14476): bounds 0.8 and 1.28.
#   A = 2:  r 1.5 -> min(3.0, 2.56) = 2.56 clipped;  r 0.5 -> min(1.0, 1.6) = 1.0;   r 1 -> 2.0
#   A = -1: r 1.5 -> min(-1.5, -1.28) = -1.5;        r 0.5 -> min(-0.5, -0.8) = -0.8 clipped
# sum of objectives 5.56 - 2.3 = 3.26, loss -3.26; clipped 2 of 5; mean(logp_old - logp) = -2 ln(0.75) / 5 = 0.1150728
LOSS_SUM, CLIPPED, APPROX_KL = -3.26, 2 / 5, 0.1150728
# d loss / d logp = -A r where not clipped, else 0: -2 * 0.5 = -1, -2; 1 * 1.5 = 1.5
GRADIENT = np.array([[0.0, -1.0, -2.0], [1.5, 0.0, 0.0]], np.float32)
WEIGHTS = jnp.array([[1.0, 0.5, 5.0], [2.0, 1.0, jnp.nan]], jnp.float32)
# -(2.56 + 0.5 + 10 - 3 - 0.8) = -9.26
WEIGHTED_SUM = -9.26


def loss_sum(logp=LOGP, logp_old=LOGP_OLD, advantages=ADVANTAGES, mask=MASK, weights=None):
    return policy_loss_sum(logp, logp_old, advantages, mask, weights, loss=PolicyLoss(clip_low=0.2, clip_high=0.28))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_hand_computed(transform):
    (value, stats), gradient = transform(jax.value_and_grad(loss_sum, has_aux=True))(LOGP)
    np.testing.assert_allclose(value, LOSS_SUM, rtol=1e-6)
    np.testing.assert_allclose(gradient, GRADIENT, rtol=1e-6)
    figures = finalize(stats)
    assert set(figures) == {"policy/clip_fraction", "policy/approx_kl"}
    np.testing.assert_allclose([figures["policy/clip_fraction"], figures["policy/approx_kl"]], [CLIPPED, APPROX_KL], rtol=1e-5)
    np.testing.assert_allclose(transform(loss_sum)(weights=WEIGHTS)[0], WEIGHTED_SUM, rtol=1e-6)


def test_vmap_over_sequences_sums_to_the_batch():
    rows, _ = jax.vmap(lambda a, b, c, d: loss_sum(a[None], b[None], c[None], d[None]))(LOGP, LOGP_OLD, ADVANTAGES, MASK)
    np.testing.assert_allclose(rows, [-5.56, 2.3], rtol=1e-6)


def test_on_policy_gradient_is_the_policy_gradient():
    # r = 1 exactly: the two branches tie, and the gradient must be -A, not half of it.
    gradient = jax.grad(lambda x: loss_sum(x, jnp.zeros((2, 3), jnp.float32), mask=jnp.ones((2, 3), bool))[0])(jnp.zeros((2, 3)))
    np.testing.assert_array_equal(gradient, [[-2.0] * 3, [1.0] * 3])


def test_only_logp_has_a_gradient():
    gradients = jax.grad(lambda a, b, c: loss_sum(LOGP, a, b, MASK, c)[0], argnums=(0, 1, 2))(LOGP_OLD, ADVANTAGES, WEIGHTS)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, jnp.zeros_like(gradient))


def test_extreme_ratio_stays_finite_and_has_no_gradient():
    far = jnp.full((2, 3), 90.0, jnp.float32)
    zero, mask = jnp.zeros((2, 3), jnp.float32), jnp.ones((2, 3), bool)
    value, gradient = jax.value_and_grad(lambda x: loss_sum(x, zero, -jnp.ones(2, jnp.float32), mask)[0])(far)
    np.testing.assert_allclose(value, 6 * np.exp(20.0), rtol=1e-5)
    np.testing.assert_array_equal(gradient, zero)


def test_adv_06_token_advantages_act_on_their_tokens_only():
    advantages = jnp.array([[0.0, 3.0, 0.0], [0.0, 0.0, jnp.nan]], jnp.float32)
    value, gradient = jax.value_and_grad(lambda x: loss_sum(x, advantages=advantages)[0])(LOGP)
    np.testing.assert_allclose(value, -1.5, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.0, -1.5, 0.0], [0.0, 0.0, 0.0]], rtol=1e-6)


def test_adv_02_equal_rewards_give_loss_zero_not_nan():
    value, gradient = jax.value_and_grad(lambda x: normalized(loss_sum(x, advantages=jnp.zeros(2, jnp.float32))[0], 5))(LOGP)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, jnp.zeros((2, 3)))


def test_adv_03_zero_variance_groups_stay_in_the_denominator_unless_they_are_filtered():
    advantages = ADVANTAGES * jnp.array([1.0, 0.0], jnp.float32)
    total = loss_sum(advantages=advantages)[0]
    np.testing.assert_allclose(normalized(total, token_count(MASK)), -5.56 / 5, rtol=1e-6)
    # Filtered by dynamic sampling, the group is no part of the batch, and the others weigh more.
    kept = jax.tree.map(lambda x: x[:1], (LOGP, LOGP_OLD, ADVANTAGES, MASK))
    np.testing.assert_allclose(normalized(loss_sum(*kept)[0], token_count(kept[3])), -5.56 / 3, rtol=1e-6)


def test_len_06_token_mean_with_a_padded_row():
    padded = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), (LOGP, LOGP_OLD, ADVANTAGES))
    mask = jnp.concatenate([MASK, jnp.zeros((1, 3), bool)])
    value, stats = loss_sum(padded[0], padded[1], padded[2], mask)
    # Mean over the 5 sampled tokens. A mean per sequence first would give (-5.56 / 3 + 2.3 / 2) / 2 = -0.3516667.
    np.testing.assert_allclose(normalized(value, token_count(mask)), LOSS_SUM / 5, rtol=1e-6)
    assert finalize(stats)["policy/clip_fraction"] == pytest.approx(CLIPPED)


def random_batch(sequences=8, tokens=12):
    keys = jax.random.split(jax.random.key(3), 5)
    lengths = jax.random.randint(keys[0], (sequences,), 0, tokens + 1)
    lengths = lengths.at[0].set(tokens).at[1].set(0).at[2].set(1)
    return {
        "logp": -jax.random.uniform(keys[1], (sequences, tokens)) * 3,
        "logp_old": -jax.random.uniform(keys[2], (sequences, tokens)) * 3,
        "advantages": jax.random.normal(keys[3], (sequences,)),
        "mask": jnp.arange(tokens)[None, :] < lengths[:, None],
        "weights": jax.random.uniform(keys[4], (sequences, tokens)) * 5,
    }


@jax.jit
def jitted_loss(batch):
    return loss_sum(**batch)


@jax.jit
def whole(batch, count):
    def loss(logp):
        return normalized(loss_sum(**(batch | {"logp": logp}))[0], count)

    return jax.value_and_grad(loss)(batch["logp"])


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_len_01_03_04_05_micro_batches_give_the_same_loss_and_gradient(parts):
    batch = random_batch()
    count = token_count(batch["mask"])
    value, gradient = whole(batch, count)
    split = [jax.tree.map(lambda x, i=i: jnp.split(x, parts)[i], batch) for i in range(parts)]
    pieces = [whole(part, count) for part in split]
    np.testing.assert_allclose(sum(float(v) for v, _ in pieces), value, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([g for _, g in pieces]), gradient)
    # Control: micro-batches that divide by their own count give another loss, for their lengths differ.
    if parts > 1:
        local = sum(float(whole(part, token_count(part["mask"]))[0]) for part in split) / parts
        assert abs(local - float(value)) > 1e-3


def test_len_01_micro_batches_of_unequal_size():
    batch = random_batch()
    count = token_count(batch["mask"])
    value, gradient = whole(batch, count)
    pieces = [whole(jax.tree.map(lambda x, a=a, b=b: x[a:b], batch), count) for a, b in [(0, 1), (1, 3), (3, 8)]]
    np.testing.assert_allclose(sum(float(v) for v, _ in pieces), value, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([g for _, g in pieces]), gradient)


def test_len_02_statistics_do_not_depend_on_the_split():
    batch = random_batch()
    expected = finalize(combine([jitted_loss(batch)[1]]))
    for borders in ([4], [1, 3], [1, 2, 3, 4, 5, 6, 7]):
        parts = [dict(zip(batch, values, strict=True)) for values in zip(*(jnp.split(x, borders) for x in batch.values()), strict=True)]
        assert finalize(combine([jitted_loss(part)[1] for part in parts])) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("extra", [1, 4])
def test_len_07_padding_changes_neither_loss_nor_gradient(extra):
    batch = random_batch()
    count = token_count(batch["mask"])
    value, gradient = whole(batch, count)

    def pad(x):
        fill = False if x.dtype == bool else jnp.nan
        return jnp.pad(x, [(0, extra)] * x.ndim, constant_values=fill)

    padded = jax.tree.map(pad, batch)
    assert token_count(padded["mask"]) == count
    padded_value, padded_gradient = whole(padded, count)
    np.testing.assert_allclose(padded_value, value, rtol=1e-6)
    np.testing.assert_array_equal(padded_gradient[:8, :12], gradient)
    assert not np.asarray(padded_gradient)[8:].any() and not np.asarray(padded_gradient)[:, 12:].any()


def test_len_01_shards_on_several_devices_share_one_denominator():
    # What a sharded step does: each shard's sum and count, summed over shards, divided once.
    batch = random_batch()
    value, _ = whole(batch, token_count(batch["mask"]))
    shards = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)

    def shard_loss(shard):
        total = jax.lax.psum(loss_sum(**shard)[0], "data")
        return normalized(total, jax.lax.psum(token_count(shard["mask"]), "data"))

    np.testing.assert_allclose(jax.vmap(shard_loss, axis_name="data")(shards), jnp.full(4, value), rtol=1e-6)
