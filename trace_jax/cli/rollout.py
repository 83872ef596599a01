"""`trace-jax rollout`: generate answers without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_jax.cli.arguments import Json, MaxPrompts, Overrides, Seed, Split
from trace_jax.cli.common import run_and_show


def rollout(
    source: Annotated[Path, typer.Argument(metavar="CONFIG_OR_CHECKPOINT", help="YAML configuration, run folder or checkpoint folder.")],
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", help="JSON Lines file of the trajectories; must not exist.")] = Path("rollout.jsonl"),
    save_cache: Annotated[Path | None, typer.Option("--save-cache", help="Folder for the guidance cache.")] = None,
    split: Split = None,
    max_prompts: MaxPrompts = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Generate only: trajectories to JSON Lines, guidance cache to files."""
    from trace_jax.evaluation.rollout import generate_rollouts, print_rollouts

    run_and_show(
        lambda display: generate_rollouts(
            source,
            overrides or [],
            out=out,
            save_cache=save_cache,
            split=split,
            max_prompts=max_prompts,
            seed=seed,
            announce=display.announce,
        ),
        print_rollouts,
        json=json,
    )
