"""Arguments and options that several commands share, with one wording each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigFile: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration.")]
Overrides: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file, such as rollout.group_size=16.")
]
OutFolder: TypeAlias = Annotated[Path | None, typer.Option("--out", help="Folder to write to; runs/NAME by default.")]
Policy: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run folder, checkpoint folder, or one step of it.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
Task: TypeAlias = Annotated[str | None, typer.Option("--task", help="Another task, such as reasoning_gym:chain_sum or jsonl:FILE.")]
Split: TypeAlias = Annotated[str | None, typer.Option("--split", help="train, validation or test; the configuration's by default.")]
MaxPrompts: TypeAlias = Annotated[int | None, typer.Option("--max-prompts", min=1, help="Prompts used, from the start of the split.")]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")]
