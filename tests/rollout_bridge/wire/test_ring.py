"""One ring in one process: views, back-pressure, damage, roles, versions, and where it lies."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rollout_bridge.wire import CorruptSlot, Ring, RingFull, RingReader, RingWriter, WireError, code_checksum, layout, place
from rollout_bridge.wire import side as side_module
from tests.rollout_bridge.wire.programs import record, same


def test_the_reader_s_arrays_are_views_of_shared_memory_that_cannot_be_written(ring: Ring):
    with RingWriter(ring.path) as writer, RingReader(ring.path) as reader:
        writer.send(record(0), 1.0)
        with reader.receive(1.0) as received:
            assert received is not None
            tokens = received.arrays["tokens"]
            assert tokens.ctypes.data % layout.LINE == 0 and not tokens.flags.owndata
            with pytest.raises(ValueError, match="read-only"):
                tokens[0] = 1
            with open(ring.path, "r+b") as file:  # a byte changed by somebody else shows through, so nothing was copied
                data = file.read()
                place_of_tokens = data.index(tokens[:64].tobytes())
                file.seek(place_of_tokens)
                file.write((int(tokens[0]) ^ 1).to_bytes(4, "little"))
            assert int(tokens[0]) == int(record(0)["tokens"][0]) ^ 1
        reader.close()
        assert int(tokens[1]) == int(record(0)["tokens"][1])  # closing does not pull the memory away


def test_a_full_ring_refuses_in_time_and_says_who_is_missing(ring: Ring):
    with RingWriter(ring.path) as writer:
        for number in range(3):
            writer.send(record(number), 0.0)
        begin = time.monotonic()
        with pytest.raises(RingFull, match=r"all 3 slots are full after 0.2 s: no reader has opened the ring; start the trainer's side"):
            writer.send(record(3), 0.2)
        assert 0.2 <= time.monotonic() - begin < 5
        with RingReader(ring.path) as reader, reader.receive(0.0) as received:
            assert received is not None and received.number == 0
        with pytest.raises(TimeoutError):  # RingFull is one
            assert writer.send(record(3), 0.0) == 3
            writer.send(record(4), 0.0)
        with pytest.raises(RingFull, match="the reader has closed the ring; stop sending"):
            writer.send(record(4), 0.0)


def test_an_empty_ring_gives_none_in_time(ring: Ring):
    with RingReader(ring.path) as reader:
        with reader.receive(0.0) as received:
            assert received is None
        with RingWriter(ring.path), reader.receive(0.05) as received:
            assert received is None


def test_a_block_that_raises_gets_its_record_again(ring: Ring):
    with RingWriter(ring.path) as writer, RingReader(ring.path) as reader:
        writer.send(record(0), 1.0)
        with pytest.raises(KeyError), reader.receive(1.0):
            raise KeyError
        with reader.receive(1.0) as received:
            assert received is not None and received.number == 0


@pytest.mark.parametrize("target", ("tokens", "codes", "scalar", "header", "slot number", "length"))
def test_every_damage_is_found_and_named_and_the_next_record_still_arrives(ring: Ring, target: str):
    with RingWriter(ring.path) as writer, RingReader(ring.path) as reader:
        writer.send(record(0), 1.0)
        writer.send(record(1), 1.0)
        offset = layout.PAGE + {"slot number": 0, "length": 8 + 6, "header": layout.LINE + 20}.get(target, 0)
        with open(ring.path, "r+b") as file:
            if target in record(0):
                offset = file.read().index(record(0)[target].tobytes())
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0x10]))
        cause = {"header": "its header is damaged", "slot number": "its slot is damaged", "length": "its slot is damaged"}
        wanted = cause.get(target, f"array '{target}' is damaged")
        with pytest.raises(CorruptSlot, match=f"record 0 is not what was written: {wanted}; it is dropped") as caught:
            with reader.receive(1.0):
                pytest.fail("a damaged record was handed out")
        assert caught.value.sequence == 0
        with reader.receive(1.0) as received:
            assert received is not None and received.number == 1 and same(received.arrays, 1)


def test_a_record_that_cannot_travel_is_refused_before_anything_is_written(ring: Ring):
    with RingWriter(ring.path) as writer, RingReader(ring.path) as reader:
        with pytest.raises(WireError, match=r"does not fit into slots of \d+; send fewer rows"):
            writer.send({"x": np.zeros(1 << 20, np.uint8)}, 1.0)
        for array in (np.zeros(2, object), np.zeros(2, ">f4"), np.zeros(2, "U3"), np.zeros(2, [("a", "u1")])):
            with pytest.raises(WireError, match="array 'x' has dtype .* does not travel"):
                writer.send({"x": array}, 1.0)
        with reader.receive(0.0) as received:
            assert received is None
        writer.send(record(0), 1.0)
        with reader.receive(0.0) as received:
            assert received is not None and received.number == 0


def test_one_writer_and_one_reader(ring: Ring):
    with RingWriter(ring.path), RingReader(ring.path):
        with pytest.raises(WireError, match="has a writer already; a ring has one"):
            RingWriter(ring.path)
        with pytest.raises(WireError, match="has a reader already"):
            RingReader(ring.path)
    with RingWriter(ring.path), RingReader(ring.path):  # a role is free again after closing
        pass


def test_other_versions_and_files_are_refused(ring: Ring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(layout, "PROTOCOL", layout.PROTOCOL + 1)
        with pytest.raises(WireError, match="wire protocol 2 and this process runs 3.*install the same trace-jax"):
            RingReader(ring.path)
    with monkeypatch.context() as patch:
        patch.setattr(side_module, "code_checksum", lambda: 1)
        with pytest.raises(WireError, match="another version of rollout_bridge; write the worker folder again"):
            RingReader(ring.path)
    with pytest.raises(WireError, match="cannot be opened .*the ring's owner has ended"):
        RingReader(tmp_path / "absent")
    (tmp_path / "other").write_bytes(b"not a ring")
    with pytest.raises(WireError, match="is not a ring"):
        RingReader(tmp_path / "other")
    os.truncate(ring.path, ring.path.stat().st_size - 1)
    with pytest.raises(WireError, match="is cut off"):
        RingReader(ring.path)


def test_the_file_is_private_and_its_space_is_reserved(ring: Ring):
    state = ring.path.stat()
    assert state.st_mode & 0o777 == 0o600
    assert state.st_blocks * 512 >= state.st_size > 3 * layout.PAGE
    ring.close()
    ring.close()
    assert not ring.path.exists()


def test_shm_01_a_full_shared_memory_is_named_and_a_file_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SHM-01, SHM-02: containers have 64 MB. Asked before, so that nothing is killed by a page that is not there."""
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    real = os.statvfs
    full = SimpleNamespace(f_bavail=1024, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: full if path == memory else real(path))
    with pytest.warns(UserWarning, match=r"shm has 4.0 MiB free and the ring needs 8.0 MiB; .* slower: use fewer .*--shm-size"):
        made = Ring.create(slots=2, slot_bytes=1 << 22, folders=[memory, disk])
    with made, RingWriter(made.path) as writer, RingReader(made.path) as reader:
        assert made.path.parent == disk
        writer.send(record(0), 1.0)
        with reader.receive(1.0) as received:
            assert received is not None and same(received.arrays, 0)
    with pytest.raises(WireError, match="shm has 4.0 MiB free and the ring needs 8.0 MiB: use fewer or smaller slots"):
        Ring.create(slots=2, slot_bytes=1 << 22, folders=[memory])
    assert not list(memory.iterdir()) and not list(disk.iterdir())


def test_memory_that_somebody_else_took_meanwhile_is_noticed_when_it_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WireError, match="has no room for the 0.0 MiB of the ring"):
        Ring.create(slots=1, slot_bytes=64, folders=[tmp_path])
    assert not list(tmp_path.iterdir())
    with pytest.raises(WireError, match="absent cannot be used"):
        Ring.create(slots=1, slot_bytes=64, folders=[tmp_path / "absent"])
    with pytest.raises(ValueError, match="both must be positive"):
        Ring.create(slots=0, slot_bytes=64, folders=[tmp_path])


def test_a_ring_that_is_being_made_is_not_taken_for_an_abandoned_one(tmp_path: Path):
    young, old = (tmp_path / f"trace-jax-ring-{name}" for name in ("young", "old"))
    for path in (young, old):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    other = tmp_path / "something else"
    other.write_bytes(layout.MAGIC)
    assert place.remove_abandoned(tmp_path) == [old]
    assert young.exists() and other.exists()


def test_a_copy_of_the_code_has_the_same_checksum_and_a_changed_one_has_not(tmp_path: Path):
    source = Path(side_module.__file__).parent.parent
    for folder in ("wire", "vllm_plugin"):
        shutil.copytree(source / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert code_checksum(tmp_path) == code_checksum()
    (tmp_path / "wire" / "layout.py").write_text("PROTOCOL = 3\n")
    code_checksum.cache_clear()
    assert code_checksum(tmp_path) != code_checksum()
