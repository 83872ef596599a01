"""Recorded rows in the place of others, without vLLM: what the trainer sends is what a site uses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollout_bridge.assembler.replay import replay_records
from tests.rollout_bridge.assembler.captured import recorded, trajectories

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin import numerics  # noqa: E402
from rollout_bridge.vllm_plugin.capture.requests import RequestRows  # noqa: E402
from rollout_bridge.vllm_plugin.replay.replayer import Replayer  # noqa: E402

EXTRA = {"probe": None, "third": {"trace_jax": [2, 0]}, "other": {"trace_jax": [2, 1]}}
"""A request without a sample, one that is recorded, and an attempt that is not."""


def rows(start: int):
    """Two rows of each request; those of the recorded one begin at `start`."""
    return RequestRows().forward(list(EXTRA), np.asarray([0, start, 0], np.int32), np.asarray([0, 2, 4, 6], np.int32), EXTRA)


def own(site: str, layer: int):
    """What the engine itself made of six rows: other codes."""
    record = recorded(trajectories()).sites[site]
    width = (6, *record.lead, record.size)
    assert record.multiplier is not None
    return numerics.quantize(torch.full(width, 1e-3 * (1 + layer)), numerics.NVFP4, float(record.multiplier[layer]))


@pytest.mark.parametrize("site", ("expert_input", "k", "v"))
def test_recorded_rows_take_the_place_of_the_engine_s(site: str):
    replayer, one = Replayer(replay_records(trajectories())), trajectories().sequence(2)
    record = recorded(one).sites[site]
    assert record.data is not None
    last = one.num_tokens - 1
    for start, replaced in ((3, 2), (last - 1, 1), (last, 0)):
        with replayer.forward(rows(start)):
            assert replayer.active == (replaced > 0)
            for layer in range(3):
                mine, found = own(site, layer), replayer.observe(site, layer, own(site, layer))
                assert found is not None
                for array, ours, theirs in ((record.data, mine.codes, found.codes), (record.scales, mine.scales, found.scales)):
                    expected = ours.numpy().copy()
                    expected[2 : 2 + replaced] = array[start : start + replaced, layer]
                    np.testing.assert_array_equal(theirs.numpy(), expected)
        assert not replayer.active
    mine = own(site, 0)
    assert replayer.observe(site, 0, mine) is mine  # between forwards


def test_routers_have_the_recorded_choice():
    replayer, one = Replayer(replay_records(trajectories())), trajectories().sequence(2)
    assert one.routes is not None
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 6)).astype(np.float32))
    with replayer.forward(rows(3)):
        for layer in range(3):
            found = replayer.restrict(layer, logits)
            chosen = torch.topk(found[2:4], 2).indices.numpy()
            np.testing.assert_array_equal(np.sort(chosen), np.sort(one.routes.routed_experts[3:5, layer]))
            kept = np.isfinite(found.numpy())
            np.testing.assert_array_equal(found.numpy()[kept], logits.numpy()[kept])
            assert kept.sum(axis=1).tolist() == [6, 6, 2, 2, 6, 6]
    assert replayer.restrict(0, logits) is logits


def test_what_cannot_be_replayed_is_refused():
    found = trajectories()
    with pytest.raises(ValueError, match="a replay needs full codes, not 'mantissa'"):
        list(replay_records(found.replace(guidance=recorded(found).to_compact("mantissa"))))
    with pytest.raises(ValueError, match="a replay needs full codes, not None"):
        list(replay_records(found.replace(guidance=None)))
    with pytest.raises(ValueError, match="no record came"):
        Replayer([])
    records = list(replay_records(found))
    with pytest.raises(ValueError, match="k.data is missing"):
        Replayer([{name: array for name, array in record.items() if name != "k.data"} for record in records])
    with pytest.raises(ValueError, match="k.layers: the records have different layers"):
        Replayer([records[0], records[1] | {"k.layers": np.asarray([0, 1], np.uint16)}])
    replayer = Replayer(records)
    with replayer.forward(rows(3)):
        for made in (None, dataclasses.replace(own("k", 0), multiplier=torch.tensor(3.0))):
            with pytest.raises(ValueError, match="site 'k' of layer 0 is rounded otherwise than in the record"):
                replayer.observe("k", 0, made)
