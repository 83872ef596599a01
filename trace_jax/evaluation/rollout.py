"""`trace-jax rollout`: answers without training, as JSON Lines and as a guidance cache."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from trace_jax.config import load
from trace_jax.errors import UserError
from trace_jax.evaluation.answers import scored_answers
from trace_jax.evaluation.cache_origin import CacheOrigin, rollout_identity, write_origin
from trace_jax.evaluation.open_policy import OpenPolicy, open_policy
from trace_jax.evaluation.pass_rate import FIRST_SAMPLE
from trace_jax.evaluation.precisions import precision_name, rollout_name
from trace_jax.files import require_writable
from trace_jax.guidance.cache import GuidanceCache
from trace_jax.rollout.storage import json_rows, write_jsonl
from trace_jax.rollout.trajectories import Trajectories
from trace_jax.terminal import Announce, unannounced
from trace_jax.train.setup import initial_policy, sync_weights


def generate_rollouts(
    source: Path,
    overrides: Sequence[str] = (),
    *,
    out: Path,
    save_cache: Path | None = None,
    split: str | None = None,
    max_prompts: int | None = None,
    seed: int = 0,
    announce: Announce = unannounced,
) -> dict[str, Any]:
    """Generates `rollout.group_size` scored answers per prompt.

    Args:
      source: YAML config (its policy is `model.source` or random), run directory or checkpoint.
      out: JSON Lines file; must not exist.
      save_cache: folder for the trajectories with their guidance record and full-code audit; must not exist or be empty.

    Raises:
      UserError: an output exists or cannot be written, a cache is asked of a method that records nothing, or the source cannot
        be read.
    """
    _require_outputs(out, save_cache)
    announce(f"reading {source}")
    opened = _open(source, overrides)
    config = opened.config
    split = split or config.eval.split
    try:
        if save_cache is not None and config.guidance.record == "none":
            remedy = "guidance.record=mantissa" if config.rollout.residual_compensation.fraction > 0 else "method=trace"
            raise UserError(f"method {config.method} records no guidance to save; add {remedy}, or leave --save-cache out")
        setup = opened.setup(config)
        rows = opened.task.rows(split)[: max_prompts or config.eval.max_prompts]
        answers = len(rows) * config.rollout.group_size
        announce(f"generating {answers} answers, {split} split")
        with closing(setup.engine()) as engine:
            ack = sync_weights(engine, setup, opened.params, opened.multipliers, 0)
            executed = engine.capabilities()
            scored = scored_answers(
                engine,
                rows,
                opened.task,
                setup.tokenizer,
                setup.sampling,
                group_size=config.rollout.group_size,
                first_sample=FIRST_SAMPLE,
                seed=seed,
                audited=answers if save_cache is not None else 0,
            )
    finally:
        opened.task.close()
    trajectories, verified = scored.trajectories, ~np.isnan(scored.reward)
    result: dict[str, Any] = {
        "out": str(out),
        "split": split,
        "precision": rollout_name(executed),
        "sequences": trajectories.num_sequences,
        "tokens": trajectories.num_tokens,
        "reward_mean": float(scored.reward[verified].mean()) if verified.any() else float("nan"),
        "pass_rate": float(scored.correct[verified].mean()) if verified.any() else float("nan"),
        "verifier_errors": scored.verifier_errors,
    }
    # The answers first: they are of use without the cache, and the cache is not without them.
    out.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(out, json_rows(trajectories, setup.tokenizer))
    if save_cache is not None:
        correct = dict(zip(trajectories.sample_id.tolist(), scored.correct.tolist(), strict=True))
        origin = CacheOrigin(config.task.name, precision_name(executed), rollout_identity(setup, ack.checksum), correct)
        size = _save_cache(save_cache, trajectories, origin, config.guidance.cache_budget_mb << 20)
        result |= {"cache": str(save_cache), "cache_bytes": size}
    return result


def print_rollouts(result: dict[str, Any]) -> None:
    """A line per figure on stdout."""
    for name, value in result.items():
        print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")


def _require_outputs(out: Path, save_cache: Path | None) -> None:
    if out.exists():
        raise UserError(f"{out} exists; choose another --out, nothing is overwritten")
    require_writable(out)
    if save_cache is None:
        return
    if save_cache.exists() and (not save_cache.is_dir() or any(save_cache.iterdir())):
        raise UserError(f"{save_cache} is not an empty folder; choose another --save-cache")
    require_writable(save_cache)
    answers, cache = out.resolve(), save_cache.resolve()
    if answers.is_relative_to(cache) or cache.is_relative_to(answers):
        raise UserError(f"--out {out} and --save-cache {save_cache} lie in each other; choose places apart")


def _save_cache(directory: Path, trajectories: Trajectories, origin: CacheOrigin, budget_bytes: int) -> int:
    """Writes the whole cache or leaves no folder; returns its bytes."""
    try:
        cache = GuidanceCache.open(directory, budget_bytes)
        cache.put(trajectories)
        write_origin(directory, origin)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)  # it was absent or empty before
        raise
    return cache.stats().bytes


def _open(source: Path, overrides: Sequence[str]) -> OpenPolicy:
    if source.suffix not in (".yaml", ".yml"):
        return open_policy(source, overrides)
    setup, params, multipliers = initial_policy(load(source, overrides))
    return OpenPolicy(setup.config, setup.policy, params, multipliers, setup.task)
