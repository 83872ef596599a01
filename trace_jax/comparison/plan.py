"""From the words of the command line to the configs of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trace_jax.comparison.variants import chosen_variants
from trace_jax.config import COMMAND_LINE, METHODS, Config, check_for_training, load, parse_override
from trace_jax.errors import UserError


@dataclass(frozen=True)
class PlannedRun:
    """One run: which variant, which seed, and its config; `model.source` is that of the comparison until the start is known."""

    variant: str
    seed: int
    config: Config

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.variant}-seed-{self.seed}"


@dataclass(frozen=True)
class Comparison:
    """What is to be compared.

    Args:
      base: the configuration as given, with the method of the first variant and nothing else of it; the cold start follows it.
      variants: name -> config at the first seed.
      seeds: consecutive, the first is that of the config.
    """

    base: Config
    variants: Mapping[str, Config]
    seeds: tuple[int, ...]

    def runs(self) -> list[PlannedRun]:
        """Every run, one seed after the other, so that a comparison that is cut short has whole seeds."""
        return [
            PlannedRun(name, seed, config.model_copy(update={"seed": seed}))
            for seed in self.seeds
            for name, config in self.variants.items()
        ]


def plan_comparison(
    path: Path, overrides: Sequence[str] = (), *, names: Sequence[str] | None = None, file: Path | None = None, seeds: int = 1
) -> Comparison:
    """Reads and checks everything that the command line says.

    Args:
      path: YAML configuration.
      overrides: `key=value` settings of every run.
      names, file: as in `chosen_variants`.
      seeds: how many.

    Raises:
      UserError: a wrong config, variant or number of seeds, or two settings that contradict each other.
    """
    if seeds < 1:
        raise UserError(f"--seeds is {seeds}; write 1 or more")
    variants = chosen_variants(names, file)
    given = [parse_override(text)[0] for text in overrides]
    if "method" in given:
        raise UserError("method is what a comparison varies; leave method=... out and name the methods with --methods")
    first = dict(map(parse_override, next(iter(variants.values()))))
    base = load(path, [*overrides, *([f"method={first['method']}"] if "method" in first else [])])
    if base.eval.every == 0:
        raise UserError(
            "eval.every is 0, so no reward would be there to compare; write the steps between evaluations, such as eval.every=25"
        )
    if base.seed + seeds > 2**32:
        raise UserError(f"seed is {base.seed}, too large for {seeds} seeds from there; write a smaller seed")
    configs: dict[str, Config] = {}
    for name, settings in variants.items():
        _refuse_set_twice(name, [parse_override(text)[0] for text in settings], given)
        stated = COMMAND_LINE if name in METHODS else f"in variant {name} of {file}, or on the command line"
        try:
            config = load(path, [*overrides, *settings], stated=stated)
            check_for_training(config)
        except UserError as error:
            raise UserError(f"method {name}: {error}") from None
        configs[name] = config
    _refuse_equal(configs)
    return Comparison(base, configs, tuple(range(base.seed, base.seed + seeds)))


def _refuse_set_twice(name: str, settings: Sequence[str], given: Sequence[str]) -> None:
    for key in settings:
        for other in given:
            if key == other or key.startswith(f"{other}.") or other.startswith(f"{key}."):
                raise UserError(f"variant {name} sets {key}, and so does {other}=... on the command line; remove one of the two")


def _refuse_equal(configs: Mapping[str, Config]) -> None:
    seen: dict[str, str] = {}
    for name, config in configs.items():
        content = config.model_copy(update={"method": ""}).model_dump_json()
        if content in seen:
            raise UserError(f"{seen[content]} and {name} are the same configuration; leave one of them out")
        seen[content] = name
