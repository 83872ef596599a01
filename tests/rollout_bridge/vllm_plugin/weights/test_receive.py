"""An update comes whole and flawless out of the ring, or is refused with a line that names the tensor; the next one is then taken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rollout_bridge.engine.weights import layer_records, send
from rollout_bridge.wire import Ring, RingReader, RingWriter
from rollout_bridge.wire.weight_records import HEADER, RecordHeader, header_array
from tests.conftest import ROOT
from tests.rollout_bridge.engine.weight_updates import changed, update
from tests.rollout_bridge.vllm_plugin.weights.test_expected import layout
from trace_jax.rollout.weight_update import LayerUpdate, UpdateDigest

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")
from rollout_bridge.vllm_plugin.weights.digest import Digest  # noqa: E402
from rollout_bridge.vllm_plugin.weights.errors import WeightsRefused  # noqa: E402
from rollout_bridge.vllm_plugin.weights.expected import TensorSpec, expected_tensors  # noqa: E402
from rollout_bridge.vllm_plugin.weights.receive import receive_update  # noqa: E402
from rollout_bridge.vllm_plugin.weights.staging import StagedUpdate, bad_values  # noqa: E402
from tests.rollout_bridge.vllm_plugin.numerics.torch_cases import to_numpy  # noqa: E402

EXPECTED = expected_tensors(layout(required_kv=("k", "v")))
LAYER = "model.layers.1."
EXPERTS = f"{LAYER}mlp.experts."


@pytest.fixture
def ends(tmp_path: Path) -> Generator[tuple[RingWriter, RingReader], None, None]:
    """Both ends of a ring that holds two updates, so that one thread can send and then receive."""
    with (
        Ring.create(slots=80, slot_bytes=12_000, folders=[tmp_path]) as ring,
        RingWriter(ring.path) as writer,
        RingReader(ring.path) as reader,
    ):
        yield writer, reader


def records(updates: Any, version: int) -> list[dict[str, np.ndarray]]:
    """The records of an update without its end marker."""
    parts = [part for one in updates for part in layer_records(one.tensors, 12_000)]
    return [{HEADER: header_array(RecordHeader(version, number, pieces)), **arrays} for number, (pieces, arrays) in enumerate(parts)]


def end(version: int, number: int, count: int, checksum: str) -> dict[str, np.ndarray]:
    """An end marker."""
    return {HEADER: header_array(RecordHeader(version, number, {}, (count, checksum)))}


def put(writer: RingWriter, *sent: dict[str, np.ndarray]) -> None:
    """Sends records as they are."""
    for record in sent:
        writer.send(record, 0.0)


def receive(reader: RingReader, version: int, timeout_s: float = 30.0) -> StagedUpdate:
    return receive_update(reader, version, timeout_s, lambda: StagedUpdate(EXPECTED))


def assert_is(staged: StagedUpdate, updates: Any) -> None:
    """The tensors of the updates, bit for bit, with the trainer's checksum."""
    digest = UpdateDigest()
    sent = {}
    for one in updates:
        digest.add(one)
        sent |= one.tensors
    ack = digest.ack(0)
    assert (staged.count, staged.checksum) == (ack.count, ack.checksum)
    assert list(staged.tensors) == list(sent)
    assert all(
        np.array_equal(to_numpy(tensor).view(np.uint8), sent[name].view(np.uint8)) for name, tensor in staged.tensors.items() if tensor.ndim
    )
    assert all(float(tensor) == float(sent[name]) for name, tensor in staged.tensors.items() if not tensor.ndim)


def test_updates_arrive_as_they_were_sent(ends):
    writer, reader = ends
    for version, seed in ((1, 0), (2, 1)):
        expected = send(update(seed=seed), writer, version)
        staged = receive(reader, version)
        assert_is(staged, update(seed=seed))
        assert (staged.count, staged.checksum) == (expected.count, expected.checksum)


def with_value(index: Any, value: float) -> Any:
    def change(tensor: np.ndarray) -> np.ndarray:
        tensor[index] = value
        return tensor

    return change


FAULTS = {
    "missing": (f"{EXPERTS}up_proj.weight_scale_2", lambda t: None, "is missing"),
    "extra": (
        f"{LAYER}mlp.gate.weight",
        lambda t: {f"{LAYER}mlp.gate.weight": t, f"{LAYER}self_attn.o_proj.bias": t[0]},
        "o_proj.bias is not",
    ),
    "shape": (f"{EXPERTS}down_proj.weight", lambda t: t[:, :-1], "and the engine takes uint8 (6, 64, 16)"),
    "transposed": (f"{LAYER}self_attn.o_proj.weight", lambda t: np.ascontiguousarray(t.T), "is bfloat16 (128, 64)"),
    "type": ("model.norm.weight", lambda t: t.astype(np.float32), "is float32 (64,) and the engine takes bfloat16"),
    "nan": ("lm_head.weight", with_value((96, 3), np.nan), "NaN or infinity"),
    "infinity": (f"{LAYER}self_attn.q_norm.weight", with_value(5, np.inf), "NaN or infinity"),
    "nan multiplier": (f"{EXPERTS}down_proj.weight_scale_2", with_value(5, np.nan), "NaN or infinity"),
    "zero multiplier": (f"{EXPERTS}input_scale", lambda t: np.float32(0.0), "is not positive"),
    "negative multiplier": (f"{EXPERTS}down_proj.weight_scale_2", with_value(2, -1.0), "is not positive"),
    "nan scale": (f"{EXPERTS}gate_proj.weight_scale", with_value((5, 31, 3), 0x7F), "block scale that is negative or NaN"),
    "negative scale": (f"{EXPERTS}gate_proj.weight_scale", with_value((0, 0, 0), 0x81), "block scale that is negative or NaN"),
    "gate and up": (f"{EXPERTS}up_proj.weight_scale_2", lambda t: 2 * t, "differs from"),
    "cache scale": (f"{LAYER}self_attn.k_proj.k_scale", lambda t: t * np.float32(1 + 2**-9), "which bfloat16 cannot hold"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_update_is_refused_and_the_next_one_taken(ends, fault: str):
    writer, reader = ends
    name, change, reason = FAULTS[fault]
    send(changed(update(), name, change), writer, 1)
    send(update(), writer, 2)
    with pytest.raises(WeightsRefused) as refused:
        receive(reader, 1)
    assert_is(receive(reader, 2), update())
    line = str(refused.value)
    assert line.startswith("weights of version 1 refused, those in use stay: ") and reason in line and "\n" not in line
    assert (f"{LAYER}self_attn.o_proj.bias" if fault == "extra" else name) in line


def test_several_missing_tensors_are_counted(ends):
    writer, reader = ends
    send([one for one in update() if one.layer_id != 1], writer, 1)
    with pytest.raises(WeightsRefused, match=rf"{LAYER}.*weight is missing \(and {len(update()[1].tensors) - 1} more\)"):
        receive(reader, 1)


def test_a_tensor_sent_twice(ends):
    writer, reader = ends
    name = f"{LAYER}mlp.gate.weight"
    again = LayerUpdate(None, {name: update()[1].tensors[name]})
    put(writer, *(whole := records([*update(), again], 1)), end(1, len(whole), 0, ""))
    with pytest.raises(WeightsRefused, match=f"{name} was sent twice"):
        receive(reader, 1)


def test_the_end_marker_counts(ends):
    """All tensors are there, and the sender says that there were others."""
    writer, reader = ends
    expected = send(update(), writer, 0)
    receive(reader, 0)
    for count, checksum in ((expected.count + 1, expected.checksum), (expected.count, "0" * 16)):
        put(writer, *(whole := records(update(), 1)), end(1, len(whole), count, checksum))
        with pytest.raises(WeightsRefused, match=f"{expected.count} tensors with checksum {expected.checksum} arrived where {count} with"):
            receive(reader, 1)


@pytest.mark.parametrize("version", (1, 2))
def test_an_update_broken_off_leaves_nothing_behind(ends, version: int):
    """Its records that were read, and those still in the ring, are dropped before the next update, whether that has its version or not."""
    writer, reader = ends
    whole = records(update(seed=1), 1)
    put(writer, *whole[:3])
    with pytest.raises(WeightsRefused, match="the trainer sent nothing for 0 s"):
        receive(reader, 1, timeout_s=0.0)
    put(writer, *whole[3:], end(1, len(whole), 0, ""))
    send(update(), writer, version)
    assert_is(receive(reader, version), update())
    put(writer, *(record for record in records(update(seed=1), version)[:4]))  # and one that begins anew halfway
    send(update(), writer, version)
    assert_is(receive(reader, version), update())


@pytest.mark.parametrize("lost", (0, 1, -1))
def test_a_lost_record_is_noticed(ends, lost: int):
    writer, reader = ends
    whole = records(update(), 1)
    del whole[lost]
    put(writer, *whole, end(1, len(whole) + 1, 0, ""))
    reason = "the trainer sent nothing" if lost == 0 else "was next"
    with pytest.raises(WeightsRefused, match=reason):
        receive(reader, 1, timeout_s=0.0)


@pytest.mark.parametrize("damaged", (0, 2))
def test_a_damaged_record_is_noticed(ends, damaged: int):
    writer, reader = ends
    whole = records(update(), 1)
    put(writer, *whole, end(1, len(whole), 0, ""))
    data = reader._slot(damaged)[1]
    data[6_000] ^= 1
    with pytest.raises(WeightsRefused, match=f"record {damaged} is not what was written"):
        receive(reader, 1)


def test_another_kind_of_record(ends):
    writer, reader = ends
    put(writer, {"tokens": np.arange(3)})
    with pytest.raises(WeightsRefused, match="no part of an update; give the path of the weights' ring"):
        receive(reader, 1, timeout_s=0.0)


def test_a_dead_trainer(ends):
    writer, reader = ends
    writer.close()
    with pytest.raises(WeightsRefused, match="the writer has closed the ring"):
        receive(reader, 1)


@pytest.mark.parametrize("dtype", (np.uint8, np.float32, ml_dtypes.bfloat16, np.int32))
@pytest.mark.parametrize("shape", ((), (1,), (3, 5), (2, 0, 4), (67, 8200)))
def test_the_checksum_is_the_trainer_s(dtype, shape):
    tensor = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    trainer, worker = UpdateDigest(), Digest()
    trainer.add(LayerUpdate(0, {"a.b": tensor, "c.d": np.float32(3.0)}))
    worker.add("c.d", "float32", (), np.float32(3.0).reshape(1).view(np.uint8))
    worker.add("a.b", str(tensor.dtype), tensor.shape, tensor.reshape(-1).view(np.uint8))
    assert trainer.ack(0).checksum == worker.checksum and trainer.ack(0).count == worker.count == 2


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("size", (1, 7, 64, 1003))
def test_a_value_that_is_not_finite_is_found_wherever_it_is(dtype: Any, size: int):
    tensor = torch.randn(size, dtype=dtype)
    spec = TensorSpec("", (size,), "float")
    assert bad_values(tensor, spec) is None
    for index in {0, size // 2, size - 9, size - 1} & set(range(size)):
        for value in (torch.nan, torch.inf, -torch.inf):
            tensor[index], kept = value, float(tensor[index])
            assert bad_values(tensor, spec) == "holds NaN or infinity"
            tensor[index] = kept
    assert bad_values(tensor, spec) is None


WORKER = """
import sys
for name in ("jax", "jaxlib", "jaxtyping", "ml_dtypes", "pallas_kernels", "trace_jax", "vllm"):
    sys.modules[name] = None  # importing it raises
from pathlib import Path
from rollout_bridge.vllm_plugin.weights.expected import ModelLayout, expected_tensors
from rollout_bridge.vllm_plugin.weights.receive import receive_update
from rollout_bridge.vllm_plugin.weights.staging import StagedUpdate
from rollout_bridge.wire import RingReader
expected = expected_tensors(ModelLayout(**eval(sys.argv[2])))
with RingReader(Path(sys.argv[1])) as reader:
    for version in (1, 2):
        staged = receive_update(reader, version, 60.0, lambda: StagedUpdate(expected))
        print(staged.count, staged.checksum)
"""


def test_two_processes_without_jax_in_the_worker(tmp_path: Path, environment: dict[str, str]):
    arguments = repr(vars(layout()))
    with Ring.create(slots=2, slot_bytes=12_000, folders=[tmp_path]) as ring, RingWriter(ring.path) as writer:
        command = [sys.executable, "-c", WORKER, str(ring.path), arguments]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT) as worker:
            expected = [send(update(seed=version - 1), writer, version) for version in (1, 2)]
            output, _ = worker.communicate(timeout=60.0)
    assert worker.returncode == 0
    assert output.splitlines() == [f"{ack.count} {ack.checksum}" for ack in expected]
