#!/usr/bin/env python3
"""Writes the tables of options into docs/serving.md from their definitions. `--check` only says if they are current."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from noria.config import ServerOptions

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
BEGIN, END = "<!-- server options -->\n", "<!-- end -->"


def option_table() -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for spec in dataclasses.fields(ServerOptions):
        flags = ", ".join(f"`{flag}`" for flag in (f"--{spec.name.replace('_', '-')}", *spec.metadata["aliases"]))
        default = "the model's own name" if spec.default == () else f"`{spec.default}`"
        rows.append(f"| {flags} | {default} | {spec.metadata['help']} |")
    return "\n".join(rows) + "\n"


def updated(page: str) -> str:
    before, rest = page.split(BEGIN)
    return before + BEGIN + option_table() + END + rest.split(END, 1)[1]


def main() -> int:
    page = PAGE.read_text()
    new = updated(page)
    if "--check" in sys.argv:
        return 0 if new == page else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
