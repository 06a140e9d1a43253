"""The list of commands. Their modules import the library inside their functions, so that help is shown at once."""
from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gptoss_lab.cli import bench, chat, checkpoints, cost, generation, machine, parallel, profile, results, serve
from gptoss_lab.cli.errors import OneLine

Version = Annotated[bool, typer.Option("--version", help="Print the version.")]
app = typer.Typer(
    help="gpt-oss from its weights to its answers: checkpoints, the engine, Harmony, measurements.",
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False,
)
app.command("capabilities")(machine.capabilities)
app.command("inspect")(checkpoints.inspect)
app.command("synth")(checkpoints.synth)
app.command("convert")(checkpoints.convert)
app.command("generate")(generation.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("profile")(profile.profile)
app.add_typer(results.results, name="results")
app.add_typer(bench.bench, name="bench")
parallel.register(app, bench.bench)
app.add_typer(cost.cost, name="cost")


@app.callback()
def root(context: typer.Context, version: Version = False) -> None:
    """Show the version, or the help where no command is given."""
    if version:
        print(importlib.metadata.version("gptoss-lab"))
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code; see errors.py."""
    with OneLine() as outcome:
        outcome.code = app(args=arguments, prog_name="gptoss-lab", standalone_mode=False) or 0
        sys.stdout.flush()
        if outcome.code == 130:  # typer has caught the interrupt itself
            raise KeyboardInterrupt
    return outcome.code
