"""`rollout --save-cache`, then `mismatch --cache`: whole, of the same policy, with the verdicts of the task, or refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from trace_jax.errors import UserError
from trace_jax.evaluation.cache_origin import NAME, read_origin, rollout_identity
from trace_jax.evaluation.mismatch import measure_mismatch
from trace_jax.evaluation.open_policy import OpenPolicy
from trace_jax.evaluation.pass_rate import wilson
from trace_jax.evaluation.precision_rollout import cached_rollout
from trace_jax.evaluation.rollout import _open, generate_rollouts
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.tasks import Task, Verdict

MXFP4 = ["rollout.weights=mxfp4", "rollout.activations=mxfp4", "rollout.kv_cache={k: mxfp4, v: mxfp4}"]


def saved(config_file: Path, place: Path, *overrides: str) -> Path:
    """A cache of 3 prompts x 4 answers, written with these overrides."""
    generate_rollouts(config_file, overrides, out=place.with_suffix(".jsonl"), save_cache=place, max_prompts=3)
    return place


@pytest.fixture(scope="module")
def written(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of the configuration as it is."""
    return saved(config_file, tmp_path_factory.mktemp("written") / "cache")


@pytest.fixture
def cache(written: Path, tmp_path: Path) -> Path:
    """The same, to change."""
    return Path(shutil.copytree(written, tmp_path / "cache"))


def change(cache: Path, **fields: object) -> None:
    """Other content of the origin."""
    (cache / NAME).write_text(json.dumps(json.loads((cache / NAME).read_bytes()) | fields))


@pytest.fixture(scope="module")
def opened(config_file: Path) -> Iterator[OpenPolicy]:
    """The policy of the configuration as it is."""
    policy = _open(config_file, [])
    yield policy
    policy.task.close()


def test_verdicts_and_prompts_are_those_of_the_rollout(
    opened: OpenPolicy, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward may call 0.7 right, and 4 answers to a prompt are one prompt."""

    def verdicts(self: Task, rows: Sequence[object], completions: Sequence[str]) -> list[Verdict]:
        return [Verdict(0.7 if index < 4 else 0.9, index < 4) for index in range(len(rows))]

    monkeypatch.setattr(Task, "score_batch", verdicts)
    found = cached_rollout(opened, saved(config_file, tmp_path / "cache"))
    assert (found.precision, found.prompts, found.trajectories.num_sequences) == ("nvfp4", 3, 12)
    assert found.pass_at_1 == pytest.approx((1 / 3, *wilson(1 / 3, 3)))  # not 0 of 12, as reward >= 1 would have it
    assert found.reward_mean == pytest.approx((0.7 + 2 * 0.9) / 3)


@pytest.mark.slow
def test_a_cache_has_the_precision_it_was_written_at(opened: OpenPolicy, config_file: Path, tmp_path: Path) -> None:
    cache = saved(config_file, tmp_path / "cache", *MXFP4)
    assert cached_rollout(opened, cache).precision == "mxfp4" == read_origin(cache).precision


def refused(opened: OpenPolicy, cache: Path) -> str:
    with pytest.raises(UserError) as error:
        cached_rollout(opened, cache)
    line = str(error.value)
    assert "\n" not in line and line.endswith("write one with trace-jax rollout --save-cache")
    return line


def test_a_cache_of_other_weights_is_refused(opened: OpenPolicy, config_file: Path, tmp_path: Path) -> None:
    line = refused(opened, saved(config_file, tmp_path / "cache", "seed=1"))
    assert re.search("was written with weights [0-9a-f]{16}, but this policy has [0-9a-f]{16};", line)


@pytest.mark.parametrize(("key", "value", "own"), [("activation_scale", "per_token", "static"), ("partial_sums", "2", "1")])
def test_a_cache_of_another_rollout_is_refused(opened: OpenPolicy, config_file: Path, cache: Path, key: str, value: str, own: str) -> None:
    other = _open(config_file, [f"rollout.{key}={value}"])
    other.task.close()
    change(cache, identity=rollout_identity(other.setup(other.config), read_origin(cache).identity["weights"]))
    assert f"was written with rollout.{key} {value}, but this policy has {own};" in refused(opened, cache)


def test_a_cache_of_several_formats_is_refused(opened: OpenPolicy, cache: Path) -> None:
    change(cache, precision="weights nvfp4, activations nvfp4, k nvfp4, v bf16")
    assert "mixes precisions (weights nvfp4, activations nvfp4, k nvfp4, v bf16)" in refused(opened, cache)


def test_a_cache_that_lost_samples_is_refused(opened: OpenPolicy, cache: Path, tmp_path: Path) -> None:
    part = tmp_path / "part"
    whole = GuidanceCache.open(cache)
    assert list(read_origin(cache).correct) == whole.keys().tolist()
    GuidanceCache.open(part, 1 << 30).put(whole.get(whole.keys()[:8]))
    shutil.copy(cache / NAME, part)
    assert "4 of 12 samples are lost or damaged" in refused(opened, part)
    for batch in cache.glob("batch-*"):
        batch.unlink()
    assert "12 of 12 samples are lost or damaged" in refused(opened, cache)


def test_a_cache_that_does_not_say_where_it_came_from_is_refused(opened: OpenPolicy, cache: Path) -> None:
    origin = cache / NAME
    change(cache, format_version=9)
    assert "has format 9, this version reads" in refused(opened, cache)
    change(cache, identity=None)
    assert "is damaged" in refused(opened, cache)
    origin.write_bytes(origin.read_bytes()[:-20])
    assert "is damaged" in refused(opened, cache)
    origin.unlink()
    assert f"has no {NAME}, so nothing says which policy answered" in refused(opened, cache)


def test_a_cache_brings_its_own_task(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave out --engine, --precisions, --task, --split and --max-prompts"):
        measure_mismatch(config_file, cache=tmp_path, task="reasoning_gym:chain_sum")
