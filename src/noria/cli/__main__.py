"""`python -m noria.cli`, for where the script is not on the path."""

from noria.cli.app import main

main()
