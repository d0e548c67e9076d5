"""`rooftile`: the command line. Heavy imports (torch, the engine) happen inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

from rooftile.cli.bench import bench_app
from rooftile.cli.chat import chat
from rooftile.cli.commands import add_command
from rooftile.cli.compile import compile_kernels
from rooftile.cli.demo import demo
from rooftile.cli.doctor import doctor
from rooftile.cli.errors import FriendlyGroup
from rooftile.cli.explain import explain
from rooftile.cli.generate import generate
from rooftile.cli.serve import serve
from rooftile.cli.streams import prepare_streams

app = typer.Typer(
    name="rooftile",
    help="Run language models at the roofline of the machine they are on.",
    cls=FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    if asked:
        from rooftile import __version__

        typer.echo(f"rooftile {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=show_version, help="Show the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", envvar="ROOFTILE_DEBUG", help="Show tracebacks of errors."),
    ] = False,
) -> None:
    """Run language models at the roofline of the machine they are on.

    MODEL is a GGUF file, a directory in Hugging Face format, a hub id, or `demo`.
    """
    prepare_streams()


for command in (generate, chat, serve, demo, doctor, explain):
    add_command(app, command)
add_command(app, compile_kernels, "compile")
app.add_typer(bench_app, name="bench")
