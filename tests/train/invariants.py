"""What must hold of the folder of every RL run, whatever happened to it on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trace_jax.config import Config, load
from trace_jax.metrics.jsonl import read_metrics
from trace_jax.train.read_checkpoint import complete_steps, read_meta
from trace_jax.train.setup import load_config_task

MODES = {"alternating": (), "asynchronous": ("sync.max_staleness=2",)}
"""Overrides of the two ways to train."""


def content(directory: Path) -> tuple[str, list[bytes]]:
    """Metrics without what a clock measured, and the answers: what a repeated run must have again, bit for bit."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(("time/", "throughput/"))} for row in read_metrics(directory)
    ]
    return json.dumps(rows), [path.read_bytes() for path in sorted((directory / "rollouts").iterdir())]


def answers_of(directory: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a step's file."""
    return [json.loads(line) for line in (directory / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def violations(directory: Path) -> list[str]:
    """What is wrong with a run: prompts lost or trained twice, steps missing or repeated, answers too old, counters that disagree.

    Every step trains on the answers in its file (without dynamic sampling on all of them), so each prompt of the stream must be in
    exactly one file, in the order of the stream, with all answers of its group, each with the next sample id.
    """
    config = load(directory / "config.yaml")
    rows = [row for row in read_metrics(directory) if row["step"]]
    steps = [row["step"] for row in rows]
    files = sorted((directory / "rollouts").iterdir())
    answers = {step: answers_of(directory, step) for step in steps if f"step_{step:06d}.jsonl" in {file.name for file in files}}
    found = []
    if steps != list(range(1, len(steps) + 1)) or [file.name for file in files] != [f"step_{step:06d}.jsonl" for step in steps]:
        found.append(f"steps {steps} of the metrics, files {[file.name for file in files]}")
    samples = [answer["sample_id"] for step in answers for answer in answers[step]]
    if samples != list(range(len(samples))):
        found.append("samples are missing, repeated or out of order")
    with load_config_task(config) as task:
        size = config.rollout.group_size
        stream = [row.prompt_id for row in task.prompts("train", 0, -(-len(samples) // size))]
        if [answer["prompt_id"] for step in answers for answer in answers[step]] != [prompt for prompt in stream for _ in range(size)]:
            found.append("prompts are not those of the stream")
    if any(answer["group"] != answer["sample_id"] // size * size for step in answers for answer in answers[step]):
        found.append("a group is torn")
    found += _wrong_versions(config, rows, answers)
    found += _wrong_counters(directory, config, rows, answers)
    return found


def _wrong_versions(config: Config, rows: list[dict[str, Any]], answers: dict[int, list[dict[str, Any]]]) -> list[str]:
    found, version = [], 0
    for row in rows:
        drawn = [answer["weight_version"] for answer in answers.get(row["step"], ()) if answer["weight_version"]]
        if any(not version - config.sync.max_staleness <= first <= last <= version for first, last in drawn):
            found.append(f"step {row['step']} begins at version {version} and uses answers of {sorted({first for first, _ in drawn})}")
        if row["sync/staleness"] > config.sync.max_staleness:
            found.append(f"step {row['step']} has staleness {row['sync/staleness']}")
        version += config.train.updates_per_batch - int(row["train/skipped_updates"])
    return found


def _wrong_counters(directory: Path, config: Config, rows: list[dict[str, Any]], answers: dict[int, list[dict[str, Any]]]) -> list[str]:
    found = []
    for step in complete_steps(directory / "checkpoints"):
        progress = read_meta(directory / "checkpoints" / str(step))["progress"]
        before = [row for row in rows if row["step"] <= step]
        expected = {
            "samples": sum(len(answers.get(row["step"], ())) for row in before),
            "data_position": sum(len(answers.get(row["step"], ())) for row in before) // config.rollout.group_size,
            "version": sum(config.train.updates_per_batch - int(row["train/skipped_updates"]) for row in before),
        }
        if any(progress[name] != value for name, value in expected.items()):
            found.append(f"checkpoint {step} has {progress}, its steps {expected}")
    return found
