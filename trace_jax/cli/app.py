"""The program `trace-jax`: a table of commands that are loaded when they are used.

1. `COMMANDS` names the file and function of each command; an installed package adds its own through the entry-point
   group `trace_jax.commands`, with values of the same form.
2. A command file is light: it parses, and imports what does the work inside its function.
3. `main` runs one command and turns its outcome into an exit code: 0 success, 2 a user error in one line on stderr,
   1 anything else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from trace_jax import __version__
from trace_jax.cli.common import Interrupted, exit_code_of, quiet_dependencies
from trace_jax.errors import UserError
from trace_jax.sharding.lost_processes import leave

COMMANDS = {
    "train": "trace_jax.cli.train:train",
    "sft": "trace_jax.cli.sft:sft",
    "eval": "trace_jax.cli.evaluate:evaluate",
    "mismatch": "trace_jax.cli.mismatch:mismatch",
    "compare": "trace_jax.cli.compare:compare",
    "rollout": "trace_jax.cli.rollout:rollout",
    "report": "trace_jax.cli.report:report",
    "import": "trace_jax.cli.import_checkpoint:import_checkpoint",
    "bench": "trace_jax.cli.bench:bench",
    "plan": "trace_jax.cli.plan:plan",
    "doctor": "trace_jax.cli.doctor:doctor",
}
"""Command name -> `module:function`, in the order of `--help`."""

COMMAND_GROUP = "trace_jax.commands"
"""Entry-point group in which packages that stand above this one offer further commands."""


def commands() -> dict[str, str]:
    """Every command of this installation: the table, then what other packages add."""
    return COMMANDS | {point.name: point.value for point in entry_points(group=COMMAND_GROUP) if point.name not in COMMANDS}


def _broken(name: str, error: Exception) -> Any:
    """A command in place of one whose entry point leads nowhere: `--help` still lists every command, and this one says what is wrong."""
    (point, *_) = entry_points(group=COMMAND_GROUP, name=name)
    package = point.dist.name if point.dist is not None else "its package"
    single = typer.Typer(add_completion=False)

    @single.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}, help=f"Broken: reinstall {package}.")
    def refuse() -> None:
        raise UserError(
            f"command {name}: the entry point {point.value} of {package} cannot be loaded ({error}); reinstall it, or remove it"
        )

    return get_command(single)


class _LazyGroup(TyperGroup):
    """A group that imports a command's file when the command is asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No arguments at all ask for the help."""
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: Any) -> list[str]:
        return list(commands())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        target = commands().get(cmd_name)
        if target is None:
            return None
        module, _, function = target.partition(":")
        try:
            command = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            if cmd_name in COMMANDS:
                raise
            return _broken(cmd_name, error)
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(command)
        return get_command(single)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise Interrupted from error  # typer would make it the exit code 130, without a word


app = typer.Typer(cls=_LazyGroup, add_completion=False)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"trace-jax {__version__}")
        raise typer.Exit()
    return wanted


@app.callback()
def program(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)] = False,
) -> None:
    """RL fine-tuning of Mixture-of-Experts models with rollout-guided FP4 quantization."""


def run(command: Callable[[], Any]) -> int:
    """Runs something and returns the exit code of its outcome; errors are reported on stderr."""
    try:
        result = command()
        sys.stdout.flush()
    except BaseException as error:
        return exit_code_of(error)
    return result if isinstance(result, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `trace-jax`.

    Args:
      arguments: words after the program's name; None takes those of the process.

    Returns:
      The exit code.
    """
    quiet_dependencies()
    code = run(lambda: get_command(app)(args=None if arguments is None else list(arguments), prog_name="trace-jax", standalone_mode=False))
    leave(code)
    return code
