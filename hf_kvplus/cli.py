"""The command line `kvplus`: its own commands, and those that other packages bring through entry points.

typer and rich are extras, so nothing here imports them before `main` runs. Every command tells bad input in one line
and exits with status 2; with KVPLUS_TRACEBACK=1 in the environment the traceback is shown instead.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

COMMAND_GROUP = "kvplus.commands"
MISSING_EXTRA = 'kvplus: the command line needs typer and rich: pip install "hf_kvplus[eval]"'
# What bad input and a machine that lacks something raise. Anything else is a defect and keeps its traceback.
INPUT_ERRORS = (ValueError, ImportError, NotImplementedError, OSError)


def main() -> None:
    """Runs the command line."""
    try:
        app = build_app()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in ("typer", "rich"):
            raise
        print(MISSING_EXTRA, file=sys.stderr)
        sys.exit(2)
    app()


def build_app() -> typer.Typer:
    """Builds the application from the commands here and the entry points of `kvplus.commands`.

    Returns:
        The application.

    Raises:
        ModuleNotFoundError: If typer or rich isn't installed.
    """
    import typer

    from hf_kvplus import commands, gqa_commands, memory_commands, plan_commands

    app = typer.Typer(
        name="kvplus",
        help="Key/value caches for transformers: run them, measure them, choose one.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    own = (commands.generate, memory_commands.memory, memory_commands.report, commands.strategies, commands.doctor)
    for command in (*own, gqa_commands.calibrate_gqa, gqa_commands.convert_gqa, plan_commands.plan):
        app.command(command_name(command))(tell_errors(command))
    for entry in importlib.metadata.entry_points(group=COMMAND_GROUP):
        app.command(entry.name)(tell_errors(entry.load()))
    return app


def tell_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command so that bad input becomes one line on the error stream and exit status 2."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        import typer

        try:
            command(*args, **kwargs)
        except INPUT_ERRORS as error:
            if os.environ.get("KVPLUS_TRACEBACK") == "1":
                raise
            typer.echo(f"kvplus {command_name(command)}: {error}", err=True)
            raise typer.Exit(2) from error

    return wrapped


def command_name(command: Callable[..., None]) -> str:
    """Returns the name under which a function is called on the command line."""
    return "eval" if command.__name__ == "evaluate" else command.__name__.replace("_", "-")
