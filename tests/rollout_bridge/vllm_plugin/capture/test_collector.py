"""The collector without vLLM: what sites show it arrives at the assembler, for the rows of samples only."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pallas_kernels import NVFP4, oracle
from rollout_bridge.assembler import Assembler, Layout, SiteLayout
from tests.pallas_kernels import cases
from trace_jax.guidance.compact import code_low_bits

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402
from rollout_bridge.vllm_plugin.capture import CapturePlan, hooks  # noqa: E402
from rollout_bridge.vllm_plugin.capture.attach import heads_part  # noqa: E402
from rollout_bridge.vllm_plugin.capture.collector import Collector, LocalSite  # noqa: E402
from rollout_bridge.vllm_plugin.capture.requests import RequestRows  # noqa: E402

WIDTH, HEADS, HEAD = 48, 4, 32
MULTIPLIER = np.float32(2.0**-6)
SHAPES = {"expert_input": (WIDTH,), "k": (HEADS, HEAD), "v": (HEADS, HEAD)}
EXTRA = {"one": {"trace_jax": [1, 0]}, "probe": None, "two": {"trace_jax": [2, 0, True]}}
BOUNDS = np.asarray([0, 5, 7, 11], np.int32)


def values(site: str, layer: int) -> np.ndarray:
    """What enters a site: the rows of the forward and one of padding."""
    return cases.normal((12, *SHAPES[site]), 10 * layer + list(SHAPES).index(site), np.float32, spread=0.5)


def layout(kind, layers: tuple[int, ...]) -> Layout:
    def sites(chosen: tuple[int, ...]) -> dict[str, SiteLayout]:
        scale = np.full(len(chosen), MULTIPLIER, np.float32)
        return {name: SiteLayout("nvfp4", shape[-1], shape[:-1], chosen, scale) for name, shape in SHAPES.items()}

    return Layout(kind, sites(layers), sites((0, 1, 2)), (0, 1, 2), 300, 2)


def collectors(plan: CapturePlan, send: Callable) -> list[Collector]:
    """Those of two tensor-parallel workers."""
    made = []
    for rank in range(2):
        part = heads_part(rank, 2, HEADS, HEAD)
        assert part is not None
        sites = {name: LocalSite((0, 1, 2), part) for name in ("k", "v")}
        whole = {"expert_input": LocalSite((0, 1, 2), (0, WIDTH))} if rank == 0 else {}
        made.append(Collector(plan, whole | sites, ((0, 1, 2), 300) if rank == 0 else None, send))
    return made


def run(collector: Collector, rank: int, routes: np.ndarray, extra=EXTRA) -> None:
    """A forward of three layers in one worker."""
    rows = RequestRows().forward(list(EXTRA), np.asarray([0, 3, 2], np.int32), BOUNDS, extra)
    hooks.install(collector)
    try:
        with collector.forward(rows):
            for layer in range(3):
                for site in SHAPES:
                    x = torch.from_numpy(values(site, layer))
                    x = x if site == "expert_input" else x[:, 2 * rank : 2 * rank + 2]
                    hooks.observe(site, layer, numerics.quantize(x, numerics.NVFP4, MULTIPLIER), x)
                ids = torch.from_numpy(routes[layer])
                collector.route(layer, ids)
                ids.zero_()
    finally:
        hooks.install(None)


@pytest.mark.parametrize("kind", ("mantissa", "codes", "scales"))
def test_what_two_workers_show_is_what_the_trainer_gets(kind):
    made = Assembler(layout(kind, (1, 2)))
    made.expect(1, 0)
    made.expect(2, 0)
    records: list[dict[str, np.ndarray]] = []
    routes = np.random.default_rng(1).integers(0, 300, (3, 12, 2)).astype(np.int32)
    for rank, collector in enumerate(collectors(CapturePlan.parse(made._layout.plan()), records.append)):
        collector.version = 6
        run(collector, rank, routes.copy())
    assert len(records) == 2 and all(record["sample"].tolist() == [1] * 5 + [2] * 4 for record in records)
    for record in records:
        made.take(record)
    one, two = made.finish(1, 0, 6), made.finish(2, 0, 7)
    for part, rows, positions in ((one, slice(0, 5), slice(0, 5)), (two, slice(7, 11), slice(2, 6))):
        assert part.guidance is not None and part.routes is not None and (part.version == 6)[positions].all()
        np.testing.assert_array_equal(np.flatnonzero(part.guidance.valid), np.arange(part.version.size)[positions])
        for site in SHAPES:
            for slot, layer in enumerate((1, 2)):
                q = oracle.quantize(values(site, layer)[rows], NVFP4, MULTIPLIER)
                mine = part.guidance.sites[site]
                np.testing.assert_array_equal(mine.scales[positions, slot], q.scales)
                if kind != "scales":
                    data = q.codes if kind == "codes" else code_low_bits(q.codes, SHAPES[site][-1])
                    assert mine.data is not None
                    np.testing.assert_array_equal(mine.data[positions, slot], data)
        np.testing.assert_array_equal(part.routes.routed_experts[positions], routes.transpose(1, 0, 2)[rows])
    assert one.audit is None and two.audit is not None and two.missing == 2
    for site in SHAPES:
        full = np.stack([oracle.quantize(values(site, layer)[7:11], NVFP4, MULTIPLIER).codes for layer in range(3)], axis=1)
        data = two.audit.sites[site].data
        assert data is not None
        np.testing.assert_array_equal(data[2:6], full)


def test_a_forward_that_nobody_awaits_or_that_fails_sends_nothing():
    records: list[dict[str, np.ndarray]] = []
    collector = collectors(CapturePlan("codes", (0,), ("k",), True, False), records.append)[0]
    routes = np.zeros((3, 12, 2), np.int32)
    run(collector, 0, routes, extra=dict.fromkeys(EXTRA))
    assert not records and not hooks.active()
    rows = RequestRows().forward(list(EXTRA), np.zeros(3, np.int32), BOUNDS, EXTRA)
    with pytest.raises(KeyError), collector.forward(rows):
        assert collector.active
        raise KeyError
    with pytest.raises(RuntimeError, match="site 'k' of layer 0 was not rounded"), collector.forward(rows):
        pass
    with pytest.raises(RuntimeError, match="'k' of layer 0 is not quantized by this engine"), collector.forward(rows):
        collector.observe("v", 0, None)  # not asked for
        collector.observe("k", 0, None)
    assert not records and not collector.active


def test_mantissa_bits_are_those_of_the_trainer():
    for size in (1, 7, 8, 15, 16, 33, 64):
        codes = np.random.default_rng(size).integers(0, 256, (3, 2, -(-size // 2)), np.uint8)
        np.testing.assert_array_equal(numerics.mantissa_bits(torch.from_numpy(codes), size).numpy(), code_low_bits(codes, size))


@pytest.mark.parametrize(("workers", "heads"), ((1, 4), (2, 4), (4, 4), (8, 2), (4, 1)))
def test_workers_share_the_heads(workers: int, heads: int):
    """Every value of every head is sent once."""
    parts = [part for rank in range(workers) if (part := heads_part(rank, workers, heads, 32))]
    assert sorted(value for start, stop in parts for value in range(start, stop)) == list(range(32 * heads))


def test_a_plan_that_cannot_be_is_refused():
    plan = {"kind": "codes", "layers": [0, 2], "sites": ["k"], "routes": True, "audit": False}
    assert CapturePlan.parse(plan) == CapturePlan("codes", (0, 2), ("k",), True, False)
    assert CapturePlan.parse(plan | {"kind": "none"}).sites == ()
    for change, message in (
        ({"kind": "bits"}, "capture kind 'bits'"),
        ({"sites": ["q"]}, r"capture sites \['q'\]"),
        ({"sites": ["k", "k"]}, "at most once"),
        ({"layers": [2, 0]}, r"capture layers \[2, 0\]"),
        ({"layers": [-1]}, "ascending global layer ids"),
        ({"layer": [1]}, "the capture plan has the keys"),
    ):
        with pytest.raises(ValueError, match=message):
            CapturePlan.parse(plan | change)
