"""The metrics of runs as series for plotting; what a run did not record is an empty series."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trace_jax.errors import UserError
from trace_jax.metrics.jsonl import read_metrics

AUDIT = re.compile(r"guidance/audit/(?P<what>[^/]+)/(?P<site>[^/]+)/layer_(?P<layer>\d+)")
EVAL = re.compile(r"eval/(?P<split>[^/]+)/(?P<what>pass_at_1|reward_mean)")


@dataclass(frozen=True)
class Series:
    """Values by step, only where the metric was recorded as a finite number."""

    steps: np.ndarray
    values: np.ndarray

    def __bool__(self) -> bool:
        return len(self.steps) > 0

    def median(self) -> float:
        """Median over steps (robust against one long outlier); NaN for an empty series."""
        return float(np.median(self.values)) if self else math.nan

    def tail_mean(self, count: int = 10) -> float:
        """Mean of the last ``count`` values; NaN for an empty series."""
        return float(np.mean(self.values[-count:])) if self else math.nan


@dataclass(frozen=True)
class Run:
    """One run: its name, its rows of metrics.jsonl, and the resolved config if the run has one."""

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any] = field(default_factory=dict)

    def series(self, key: str) -> Series:
        """The series of a metric."""
        pairs = [(row["step"], row[key]) for row in self.rows if _finite(row.get(key))]
        steps, values = zip(*pairs, strict=True) if pairs else ((), ())
        return Series(np.array(steps, np.int64), np.array(values, np.float64))

    def keys(self, prefix: str) -> list[str]:
        """The names of the recorded numbers that start with ``prefix``, sorted."""
        return sorted({key for row in self.rows for key, value in row.items() if key.startswith(prefix) and _finite(value)})

    def audit(self, what: str) -> dict[str, dict[int, float]]:
        """The newest audited figure by site and layer: ``{site: {layer: value}}``."""
        newest: dict[str, dict[int, float]] = {}
        for key in self.keys(f"guidance/audit/{what}/"):
            found = AUDIT.fullmatch(key)
            if found:
                newest.setdefault(found["site"], {})[int(found["layer"])] = float(self.series(key).values[-1])
        return {site: dict(sorted(layers.items())) for site, layers in newest.items()}

    def bytes_per_token(self) -> dict[str, float]:
        """The newest record size by site; ``{"record": total}`` if only the total was recorded."""
        total = "guidance/bytes_per_token"
        sites = {key.removeprefix(total + "/"): float(self.series(key).values[-1]) for key in self.keys(total + "/")}
        whole = self.series(total)
        return sites or ({"record": float(whole.values[-1])} if whole else {})

    def guided(self) -> bool:
        """Whether the forward that trains was guided by the rollout's record, as the config says."""
        quant = self.config.get("train_quant")
        return isinstance(quant, dict) and "guided" in (quant.get("activations"), quant.get("kv_cache"))

    def evaluations(self) -> list[tuple[str, str]]:
        """The recorded evaluations as (split, what), pass_at_1 before reward_mean."""
        return sorted({(m["split"], m["what"]) for m in map(EVAL.fullmatch, self.keys("eval/")) if m}, key=lambda pair: (pair[1], pair[0]))

    def text(self, key: str) -> str | None:
        """The newest text value of a metric, such as the precision of an evaluation."""
        return next((row[key] for row in reversed(self.rows) if isinstance(row.get(key), str)), None)


def load_runs(run_dirs: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads the runs; each gets the shortest name that tells it from the others.

    Raises:
        UserError: if no run is given, or a run has no metrics or unreadable ones.
    """
    paths = [Path(run_dir).resolve() for run_dir in run_dirs]
    if not paths:
        raise UserError("report: no run given; write trace-jax report RUN [RUN ...]")
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: not a run directory")
    names = _short_names(paths)
    runs = [Run(name, read_metrics(path), _config(path)) for name, path in zip(names, paths, strict=True)]
    for run, path in zip(runs, paths, strict=True):
        if not run.rows:
            raise UserError(f"{path / 'metrics.jsonl'}: no step is recorded yet; report again after the first step")
    return runs


def _short_names(paths: Sequence[Path]) -> list[str]:
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]


def _config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((path / "config.yaml").read_text())
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path / 'config.yaml'}: cannot be read; restore the resolved config that the run wrote, or remove it") from error
    return config if isinstance(config, dict) else {}


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
