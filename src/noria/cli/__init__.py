"""The `noria` command. One module per subcommand; `noria.cli.app` joins them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits; `arguments` None means those of the process.

    Imports it only now: an engine's process imports the program that started it, and has no use for a command line.
    """
    from noria.cli.app import main as run_and_exit

    run_and_exit(arguments)
