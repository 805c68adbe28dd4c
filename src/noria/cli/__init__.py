"""The `noria` command. One module per subcommand; `noria.cli.app` joins them."""

from noria.cli.app import main

__all__ = ["main"]
