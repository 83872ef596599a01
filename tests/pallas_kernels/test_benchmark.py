"""The benchmark: rows of the agreed schema for every op, work counted by hand, peers that cannot win by an artefact."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import benchmark
from pallas_kernels.benchmark import attention, elementwise, fused, peers, products, runner
from pallas_kernels.benchmark.cases import Case, Peer, Setting
from pallas_kernels.benchmark.limits import Limits
from pallas_kernels.benchmark.rows import measure
from pallas_kernels.benchmark.runner import CASES
from pallas_kernels.benchmark.targets import Target
from pallas_kernels.benchmark.timing import Call, Timer
from pallas_kernels.shapes import AttentionShape, ProductShape

FIELDS = ("op implementation shape dtype time_us bytes flops limit_share peer peer_time_us ratio target met device versions date").split()
CPU, GPU = Setting(small=True, on_gpu=False), Setting(small=False, on_gpu=True)
ONE_SHAPE = (("toy", (8, 64)),)
EXPERTS, ROWS, FEATURES, SIZE = 4, 512, 64, 256


class FixedTimer(Timer):
    """Times from a table instead of a clock; a call that is not in it refuses."""

    def __init__(self, times: dict[Call, float]) -> None:
        self._fixed = times

    def time_us(self, call: Call) -> float:
        if call not in self._fixed:
            raise NotImplementedError("not on this device")
        return self._fixed[call]


def call(name: str = "") -> Call:
    return Call(lambda x: x, (name,))


def test_rows_have_the_schema(monkeypatch):
    monkeypatch.setattr(elementwise, "SMALL", ONE_SHAPE)
    made = benchmark.run(["dequantize"], small=True)
    assert [row["op"] for row in made] == ["dequantize/nvfp4"] * 2 + ["dequantize/mxfp4"] * 2
    for row in made:
        assert list(row) == FIELDS and row["time_us"] > 0 and row["limit_share"] > 0 and row["shape"] == "toy: 8x64"
        assert (row["peer"] is None) == (row["implementation"] == "reference")
        assert row["target"] is None and row["met"] is None  # nothing is judged on a CPU
    assert json.loads(json.dumps(made)) == made


def test_unknown_op_is_explained():
    with pytest.raises(ValueError, match="unknown op matmul; write one of quantize, .*kv_append"):
        benchmark.run(["matmul"], small=True)


@pytest.mark.parametrize("op", benchmark.OPS)
def test_every_call_traces_and_gives_what_its_peer_gives(op, monkeypatch):
    """Traced as the timer would, and not run."""
    for module in (elementwise, fused):
        monkeypatch.setattr(module, "SMALL", ONE_SHAPE)
    made = list(CASES[op](CPU))
    assert {case.implementation for case in made} == {"reference", "pallas"}
    for case in made:
        results = [jax.eval_shape(each.function, *each.arguments) for each in (case.call, *(peer.call for peer in case.peers))]
        assert all(result == results[0] for result in results), case.op
        assert case.bytes > 0 and (case.flops is None) == (op in runner.MEMORY_BOUND)


@pytest.fixture
def real(monkeypatch):
    """What runs on a GPU, at sizes that fit here, and with tokamax's place taken by a call."""
    monkeypatch.setattr(products, "GROUPED", (ProductShape("experts", ROWS, EXPERTS, FEATURES, SIZE),))
    monkeypatch.setattr(products, "GROUPED_W4", tuple(ProductShape("experts", rows, EXPERTS, FEATURES, SIZE) for rows in (1, ROWS)))
    monkeypatch.setattr(attention, "DECODE", tuple(AttentionShape(2, 128, 4, 2, head_dim) for head_dim in (128, 64)))
    monkeypatch.setattr(peers, "ragged_products", lambda *_: (Peer(f"{peers.TOKAMAX} (mosaic)", call()),))


def test_work_of_fused_roundings(monkeypatch):
    monkeypatch.setattr(fused, "SMALL", ONE_SHAPE)
    x, record, tables = 2 * 8 * 64, 8 * (64 // 8 + 64 // 16 + 1), 2 * 4 * 8 * 32
    expected = {"swiglu_fake_quant": [3 * x], "residual_fake_quant": [2 * x + x // 2]}
    expected["rms_norm_fake_quant"] = [2 * x, 2 * x + record]
    expected["rope_fake_quant"] = [2 * x + tables, 2 * x + tables + record]
    for op, moved in expected.items():
        assert [case.bytes for case in CASES[op](CPU) if "/nvfp4" in case.op and case.implementation == "pallas"] == moved


@pytest.mark.usefixtures("real")
def test_work_of_products():
    x, weights, out = 2 * ROWS * SIZE, 2 * EXPERTS * FEATURES * SIZE, 2 * ROWS * FEATURES
    forward, grad_x, grad_weights = CASES["grouped_matmul"](GPU)
    assert forward.bytes == grad_x.bytes == grad_weights.bytes == x + weights + out
    assert forward.flops == grad_x.flops == grad_weights.flops == 2 * ROWS * FEATURES * SIZE
    cases = list(CASES["grouped_matmul_w4a16"](GPU))
    assert [case.op.split("/", 1)[1] for case in cases] == ["nvfp4/w4a16", "nvfp4/w4a4"] * 2 + ["mxfp4/w4a16", "mxfp4/w4a4"]
    # One row reads one expert, at 4.5 bits a weight (a scale byte for 16 values); 4.25 in MXFP4.
    assert cases[0].bytes == 2 * SIZE + FEATURES * SIZE * 9 // 16 + 2 * FEATURES
    assert cases[2].bytes == x + EXPERTS * FEATURES * SIZE * 9 // 16 + out
    assert cases[4].bytes == x + EXPERTS * FEATURES * SIZE * 17 // 32 + out


@pytest.mark.usefixtures("real")
def test_work_of_the_cache():
    tokens, kv_heads = 2 * 128, 2
    cases = list(CASES["decode_attention"](GPU))
    assert [case.shape.split()[-1] for case in cases] == ["128", "64", "128"]
    assert cases[0].bytes == 2 * 2 * (2 * 4 * 128) + 2 * tokens * kv_heads * 128 * 9 // 16
    assert cases[0].flops == 2 * (2 * 2 * 4 * 128 * 128)
    least = 2 * 2 * (2 * 4 * 128) + 2 * (2 * tokens * kv_heads * 128)
    assert cases[0].peers and all(peer.bytes == least for peer in cases[0].peers)
    one, stretch = list(CASES["kv_append"](GPU))[::2][:2]
    assert stretch.bytes == 8 * one.bytes and one.bytes == 2 * 2 * kv_heads * (2 * 128 + 128 * 9 // 16)


@pytest.mark.usefixtures("real")
def test_targets_are_where_they_belong():
    def targets(op):
        return [(case.op, case.target) for case in CASES[op](GPU)]

    teraflops = [Target("teraflops", bound) for bound in (350.0, 230.0, 230.0)]
    assert [target for _, target in targets("grouped_matmul")] == teraflops
    half, near = Target("ratio", 0.50, "tokamax ragged_dot"), Target("ratio", 1.15)
    assert [target for _, target in targets("grouped_matmul_w4a16")] == [None, near, half, near, half, near]
    assert [target for _, target in targets("decode_attention")] == [Target("ratio", 0.55), None, Target("ratio", 0.55)]


@pytest.mark.usefixtures("real")
def test_attention_peers_compute_attention():
    case = next(iter(CASES["decode_attention"](GPU)))
    one, tokens, xla = (peer.call for peer in case.peers)
    query, keys, values = xla.arguments
    grouped = query.astype(jnp.float32).reshape(2, 2, 2, 128)
    scores = jnp.einsum("bkgd,bskd->bkgs", grouped, keys.astype(jnp.float32)) * 128**-0.5
    expected = jnp.einsum("bkgs,bskd->bkgd", jax.nn.softmax(scores), values.astype(jnp.float32)).reshape(query.shape)
    with jax.numpy_dtype_promotion("standard"):
        got = xla.function(*xla.arguments)[:, 0].astype(jnp.float32)
    assert float(jnp.max(jnp.abs(got - expected))) < 0.01 < float(jnp.max(jnp.abs(expected)))
    # The heads that share a KV head, [B, K, G, D], become tokens [B, G, K, D]; cuDNN itself is not here.
    assert jnp.array_equal(tokens.arguments[0].reshape(query.shape), query) and jnp.array_equal(one.arguments[0], query)


def test_without_tokamax_the_peer_is_ours_and_the_target_is_not_judged(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    monkeypatch.setattr(products, "GROUPED_W4", (ProductShape("experts", ROWS, EXPERTS, FEATURES, SIZE),))
    case = next(iter(CASES["grouped_matmul_w4a16"](GPU)))
    times = {case.call: 1.0, case.peers[0].call: 100.0}
    row = measure(case, FixedTimer(times), Limits(1e12), GPU)
    assert row["peer"] == "our own bf16 grouped_matmul" and row["ratio"] == 0.01
    assert row["target"] == "<= 0.50 of the time of tokamax ragged_dot" and row["met"] is None


def test_the_fastest_plausible_peer_counts(caplog):
    own, slow, fast, hoisted, absent = (call(name) for name in ("own", "slow", "fast", "hoisted", "absent"))
    rivals = (Peer("slow", slow, 1000), Peer("fast", fast, 1000), Peer("hoisted", hoisted, 1000), Peer("absent", absent))
    case = Case("op", "pallas", "shape", own, 500, None, rivals, Target("ratio", 0.55))
    # Where a copy moves 100 bytes a microsecond, nobody reads 1000 in 6.6 us.
    times = {own: 6.0, slow: 20.0, fast: 6.8, hoisted: 6.6}
    row = measure(case, FixedTimer(times), Limits(1e8), GPU)
    assert (row["peer"], row["peer_time_us"], row["ratio"], row["met"]) == ("fast", 6.8, 0.8824, False)
    assert row["limit_share"] == round(5 / 6, 4)
    hoisted_said, absent_said = caplog.messages
    assert "hoisted took 6.6 us" in hoisted_said and "absent cannot serve: NotImplementedError: not on this device" in absent_said
    assert measure(case, FixedTimer(times | {own: 3.7}), Limits(1e8), GPU)["met"] is True


def test_a_case_that_fails_keeps_its_row_and_the_others(caplog):
    case = Case("op", "pallas", "shape", call("own"), 500, None, (), Target("share", 0.8))
    row = measure(case, FixedTimer({}), Limits(1e8), GPU)
    assert list(row) == FIELDS and row["time_us"] is None and row["limit_share"] is None and row["met"] is False and row["bytes"] == 500
    assert "op, pallas, shape failed: NotImplementedError: not on this device" in caplog.text


def test_memory_bound_rows_are_compared_with_a_copy_of_their_size(monkeypatch):
    copies = []
    monkeypatch.setattr(runner, "copy_bandwidth", lambda setting, timer, moved: copies.append(moved) or 1e9)
    monkeypatch.setattr(elementwise, "SMALL", ONE_SHAPE)
    rows = benchmark.run(["quantize"], small=True)
    assert copies == sorted({row["bytes"] for row in rows}, reverse=True) and len(copies) == 2
    assert all(row["limit_share"] == pytest.approx(row["bytes"] / 1e9 / (row["time_us"] * 1e-6), rel=0.01, abs=1e-4) for row in rows)


def test_limits_take_the_tighter_bound():
    assert Limits(1e9, 1e12).share(1000, 10**7, 20.0) == pytest.approx(0.5)  # 10 us of arithmetic, 1 us of memory
    assert Limits(1e9, 1e12).share(1000, 10**5, 20.0) == pytest.approx(0.05)
    assert Limits(1e9).share(1000, 10**7, 20.0) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("share", 0.80), True),
        (Target("share", 0.81), False),
        (Target("teraflops", 50), True),
        (Target("teraflops", 51), False),
        (Target("ratio", 0.5, "peer"), True),
        (Target("ratio", 0.49, "peer"), False),
        (Target("ratio", 0.5, "another"), None),
    ],
    ids=str,
)
def test_targets(target, met):
    assert target.met(time_us=2.0, limit_share=0.8, flops=10**8, peer="peer (mosaic)", ratio=0.5) is met


def test_the_timer_leaves_arguments_alone_and_times_once():
    traced = []

    def add(x):
        traced.append(x.shape)
        return x + 1

    in_place = Call(add, (jnp.zeros(8),), in_place=True)
    timer = Timer(3)
    timer.compile([in_place])
    assert len(traced) == 3  # every call on an input of its own
    first = timer.time_us(in_place)
    assert first > 0 and timer.time_us(in_place) == first and len(traced) == 3
    assert not in_place.arguments[0].is_deleted() and float(in_place.arguments[0].sum()) == 0.0


def test_appending_is_timed_in_place():
    reference = next(iter(CASES["kv_append"](CPU)))
    assert reference.call.in_place and Timer(1).time_us(reference.call) > 0
    assert not reference.call.arguments[0].key_codes.is_deleted()


def test_an_error_of_compilation_shows_when_the_call_is_timed():
    refused = Call(lambda x: x.reshape(3), (jnp.zeros(8),))
    timer = Timer(2)
    timer.compile([refused])
    with pytest.raises(TypeError, match="reshape"):
        timer.time_us(refused)
