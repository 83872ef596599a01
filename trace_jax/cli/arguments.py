"""Every argument and option that several commands share, defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigFile: TypeAlias = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration.")]
Policy: TypeAlias = Annotated[Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run folder, checkpoint folder, or one step of it.")]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that replace those of the file or run, such as rollout.group_size=16."),
]
RunFolder: TypeAlias = Annotated[Path | None, typer.Option("--out", help="Folder to write to; by default runs/ and the config's name.")]
Task: TypeAlias = Annotated[str | None, typer.Option("--task", help="Another task, such as reasoning_gym:chain_sum or jsonl:FILE.")]
Split: TypeAlias = Annotated[str | None, typer.Option("--split", help="train, validation or test; eval.split by default.")]
MaxPrompts: TypeAlias = Annotated[
    int | None,
    typer.Option("--max-prompts", min=1, help="Prompts used, from the start of the split; eval.max_prompts by default, 64 for mismatch."),
]
Seed: TypeAlias = Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")]
