"""Run folders with made-up metrics, and a comparison of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.train.conftest import VALUES
from trace_jax.comparison.plan import Comparison
from trace_jax.config import from_mapping
from trace_jax.evaluation.pass_rate import wilson

PROMPTS = 40


def evaluation(rate: float, precision: str = "nvfp4", prompts: int = PROMPTS) -> dict[str, Any]:
    """The metrics of an evaluation with one answer to each of `prompts`."""
    low, high = wilson(rate, prompts)
    figures = {"pass_at_1": rate, "pass_at_1_low": low, "pass_at_1_high": high, "reward_mean": rate + 0.1, "precision": precision}
    return {f"eval/validation/{name}": value for name, value in figures.items()}


def write_run(folder: Path, rows: dict[int, dict[str, Any]], method: str = "trace") -> Path:
    """A run folder with the given metrics by step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step} | row) + "\n" for step, row in rows.items()))
    (folder / "config.yaml").write_text(json.dumps(from_mapping(VALUES, [f"method={method}"]).model_dump(mode="json")))
    return folder


def comparison_of(*methods: str, seeds: int = 1, steps: int = 4) -> Comparison:
    """The comparison of presets with the tiny configuration."""
    configs = {name: from_mapping(VALUES, [f"method={name}", f"steps={steps}"]) for name in methods}
    return Comparison(from_mapping(VALUES, [f"steps={steps}"]), configs, tuple(range(seeds)))
