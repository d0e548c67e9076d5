"""Where the process begins: imports nothing before it can end quietly."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # the shell's exit code for ctrl-C


def main() -> None:
    try:
        from rooftile.cli.main import app

        app()
    except KeyboardInterrupt:  # once a command runs, typer ends the same way
        sys.exit(INTERRUPTED)
