"""`python -m trace_jax.study collect RUNS` and `python -m trace_jax.study render`, at the root of the checkout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from trace_jax.cli.app import run
from trace_jax.comparison.run import JSON as COMPARISON
from trace_jax.errors import UserError
from trace_jax.files import write_atomic
from trace_jax.markdown import replace_block
from trace_jax.study.curves import by_age, curves
from trace_jax.study.page import PAGE_PARTS, pictures

LOGS, PAGE, IMAGES = Path("docs/study"), Path("docs/study.md"), Path("docs/images")

app = typer.Typer(add_completion=False, help="The study of docs/study.md: its logs, tables and figures.")


@app.command()
def collect(
    folder: Annotated[Path, typer.Argument(help="Folder of a `trace-jax compare`, finished or not, or one with several of them.")],
    aged: Annotated[Path | None, typer.Option("--aged", help="Asynchronous run with audits, for the records of older weights.")] = None,
    measures: Annotated[Path | None, typer.Option("--measures", help="Folder with the JSON that `mismatch` and `eval` printed.")] = None,
) -> None:
    """Writes what the page needs to docs/study: curves.json, comparison.json if there is one, and the measurements, shortened."""
    _write("curves", curves(folder))
    if (folder / COMPARISON).exists():
        _write("comparison", _read(folder / COMPARISON))
    if aged is not None:
        _write("versions", by_age(aged))
    for path in sorted(measures.glob("*.json")) if measures is not None else ():
        _write(path.stem, _read(path))


@app.command()
def render() -> None:
    """Brings the tables of docs/study.md and its figures up to date with docs/study/*.json."""
    logs = {path.stem: _read(path) for path in sorted(LOGS.glob("*.json"))}
    if "curves" not in logs:
        raise UserError(f"{LOGS}: no curves.json; run `python -m trace_jax.study collect RUNS` at the root of the checkout first")
    text = PAGE.read_text()
    for name, table in PAGE_PARTS.items():
        text = replace_block(text, f"study {name}", table(logs))
    for name, picture in pictures(logs).items():
        write_atomic(IMAGES / f"study-{name}.png", [picture])
    write_atomic(PAGE, [text.encode()])


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); run the commands at the top of {PAGE} first") from error


def _write(name: str, value: Any) -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    write_atomic(LOGS / f"{name}.json", [json.dumps(_short(value), separators=(",", ":"), allow_nan=False).encode() + b"\n"])


def _short(value: Any) -> Any:
    """The same with four significant digits a number, so that the logs stay small."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: _short(part) for name, part in value.items()}
    return [_short(part) for part in value] if isinstance(value, list) else value


if __name__ == "__main__":
    raise SystemExit(run(lambda: get_command(app)(prog_name="python -m trace_jax.study", standalone_mode=False)))
