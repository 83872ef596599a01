"""The folder of a GuidanceCache: restart, damage, interruption; what cannot be read is missing, never wrong."""

# The attachments (routes, guidance, audit) are optional in the types and present in these batches.
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false

import builtins
import errno
import json

import pytest
from ragged_batches import assert_same, random_trajectories

from trace_jax.errors import UserError
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.guidance.cache_index import INDEX_NAME, data_files
from trace_jax.rollout import Trajectories

PLENTY = 1 << 24


def new_cache(folder):
    return GuidanceCache.open(folder, PLENTY)


def test_restart_continues(tmp_path):
    batches = [random_trajectories([4, 1], seed, first_id=10 * seed, audit=True) for seed in range(3)]
    cache = new_cache(tmp_path)
    for batch in batches:
        cache.put(batch)
    again = GuidanceCache.open(tmp_path)
    assert again.stats().budget_bytes == PLENTY and again.stats().samples == 6
    assert_same(again.get([10, 11]), batches[1])
    again.put(random_trajectories([2], 9, first_id=90))
    assert set(GuidanceCache.open(tmp_path).keys().tolist()) == {0, 1, 10, 11, 20, 21, 90}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def of_another_protocol(path):
    """The same arrays under file protocol 2, whose checksum this version cannot know; the size stays."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] |= {"protocol": "2", "checksum": "of another kind"}
    path.write_bytes(content[:8] + json.dumps(header).encode().ljust(size) + content[8 + size :])


@pytest.mark.parametrize("index", ["listed", "lost"])
@pytest.mark.parametrize("trouble", ["protocol", "EMFILE", "EACCES", "EIO"])
def test_a_file_that_cannot_be_read_now_ends_the_call_and_stays(tmp_path, monkeypatch, index, trouble):
    batch = random_trajectories([4, 1])
    new_cache(tmp_path).put(batch)
    (file,) = tmp_path.glob("batch-*")
    if index == "lost":
        (tmp_path / INDEX_NAME).unlink()
    intact = file.read_bytes()
    plain = builtins.open

    def failing(path, *args, **kwargs):
        if str(path) == str(file):
            raise OSError(getattr(errno, trouble), trouble)
        return plain(path, *args, **kwargs)

    if trouble == "protocol":
        of_another_protocol(file)
    before = contents(tmp_path)
    if trouble != "protocol":
        monkeypatch.setattr(builtins, "open", failing)
    for budget in (None, PLENTY):
        with pytest.raises(UserError, match="batch-00000000.safetensors.*(protocol 2, this version reads 1|E[A-Z]+)"):
            GuidanceCache.open(tmp_path, budget).get([0, 1])
    monkeypatch.undo()
    assert contents(tmp_path) == before
    file.write_bytes(intact)
    assert_same(GuidanceCache.open(tmp_path).get([0, 1]), batch)  # the trouble is over, and everything is there


def test_reading_changes_nothing_in_the_folder(tmp_path):
    cache = new_cache(tmp_path)
    for seed in range(4):
        cache.put(random_trajectories([4, 1], seed, first_id=10 * seed))
    flipped, cut, foreign, gone = sorted(tmp_path.glob("batch-*"))
    flipped.write_bytes(flipped.read_bytes()[:-1] + bytes([flipped.read_bytes()[-1] ^ 1]))
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    (tmp_path / "batch-00000009.safetensors").write_bytes(b"half")
    before = contents(tmp_path)
    for budget in (None, PLENTY, foreign.stat().st_size):
        opened = GuidanceCache.open(tmp_path, budget)
        assert opened.get(opened.keys()).sample_id.tolist() == [20, 21]
        assert contents(tmp_path) == before
    opened.put(random_trajectories([2], 9, first_id=90))  # a write tidies up
    assert sorted(data_files(tmp_path)) == ["batch-00000010.safetensors"]


def test_an_index_that_cannot_be_read_now_is_not_a_lost_one(tmp_path):
    new_cache(tmp_path).put(random_trajectories([4]))
    text = (tmp_path / INDEX_NAME).read_bytes()
    (tmp_path / INDEX_NAME).unlink()
    (tmp_path / INDEX_NAME).mkdir()
    with pytest.raises(UserError, match="cannot open the cache folder .*: Is a directory"):
        GuidanceCache.open(tmp_path)
    (tmp_path / INDEX_NAME).rmdir()
    (tmp_path / INDEX_NAME).write_bytes(text)
    assert GuidanceCache.open(tmp_path).stats().samples == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "swap"])
@pytest.mark.parametrize("when", ["before_open", "after_open"])
def test_damage_is_missing_never_wrong(tmp_path, damage, when):
    batches = [random_trajectories([4, 1], seed, first_id=10 * seed) for seed in range(3)]
    cache = new_cache(tmp_path)
    for batch in batches:
        cache.put(batch)
    if when == "after_open":
        cache = GuidanceCache.open(tmp_path)
    victim, other = sorted(tmp_path.glob("batch-*"))[1:]
    content = bytearray(victim.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    if damage == "delete":
        victim.unlink()
    else:
        victim.write_bytes({"flip": content, "truncate": content[:-1], "swap": other.read_bytes()}[damage])
    if when == "before_open":
        cache = GuidanceCache.open(tmp_path)
    assert_same(cache.get([0, 1, 10, 11, 20, 21]), Trajectories.concat([batches[0], batches[2]]))
    stats = cache.stats()
    assert (stats.missing, stats.damaged, stats.samples) == (2, 2, 4)
    assert cache.get([10]).num_sequences == 0  # gone for good, until it is generated again
    cache.put(batches[1])
    assert_same(cache.get([10, 11]), batches[1])
    assert len(data_files(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["absent", "half", "flip"])
def test_a_lost_index_is_rebuilt_from_the_data(tmp_path, damage):
    batches = [random_trajectories([4, 1], seed, first_id=10 * seed) for seed in range(2)]
    cache = new_cache(tmp_path)
    for batch in batches:
        cache.put(batch)
    index = tmp_path / INDEX_NAME
    text = index.read_text()
    if damage == "absent":
        index.unlink()
    else:
        index.write_text(text[: len(text) // 2] if damage == "half" else text.replace("[11, 1]", "[12, 1]"))
    again = GuidanceCache.open(tmp_path)
    assert_same(again.get([0, 1, 10, 11]), Trajectories.concat(batches))
    assert GuidanceCache.open(tmp_path).stats().samples == 4


def test_a_crash_between_data_and_index_loses_nothing(tmp_path):
    cache = new_cache(tmp_path)
    cache.put(random_trajectories([4, 1], 0, first_id=0))
    old_index = (tmp_path / INDEX_NAME).read_bytes()
    newer = random_trajectories([3], 1, first_id=1)
    cache.put(newer)
    (tmp_path / INDEX_NAME).write_bytes(old_index)
    (tmp_path / "batch-00000009.safetensors").write_bytes(b"half")  # not written by write_atomic, still survived
    again = GuidanceCache.open(tmp_path)
    assert sorted(again.keys().tolist()) == [0, 1]
    assert_same(again.get([1]), newer)


def test_an_interrupted_convert_leaves_the_old_form(tmp_path):
    batch = random_trajectories([4], guidance="codes")
    cache = new_cache(tmp_path)
    cache.put(batch)
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    cache.convert("mantissa")
    for name, content in saved.items():  # the new file is there, the index was not switched yet
        (tmp_path / name).write_bytes(content)
    assert len(data_files(tmp_path)) == 2
    again = GuidanceCache.open(tmp_path)
    assert_same(again.get([0]), batch)
    again.convert("mantissa")
    assert len(data_files(tmp_path)) == 1


def test_no_cache_and_other_versions_are_named(tmp_path):
    with pytest.raises(UserError, match="no guidance cache in .*nothing"):
        GuidanceCache.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot open the cache folder"):
        GuidanceCache.open(tmp_path / "file" / "inside", PLENTY)
