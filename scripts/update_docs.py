#!/usr/bin/env python3
"""Writes the tables of options into docs/serving.md from their definitions. `--check` only says if they are current."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from noria.config import SchedulingOptions, ServerOptions, shown_default, value_name

PAGE = Path(__file__).parent.parent / "docs" / "serving.md"
TABLES = {"<!-- server options -->\n": ServerOptions, "<!-- scheduling options -->\n": SchedulingOptions}
END = "<!-- end -->"


def option_table(options: type[ServerOptions | SchedulingOptions]) -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for spec in dataclasses.fields(options):
        name = f"--{spec.name.replace('_', '-')} {value_name(spec)}".rstrip().replace("|", "\\|")
        flags = ", ".join(f"`{flag}`" for flag in (name, *spec.metadata["aliases"]))
        rows.append(f"| {flags} | {_default(spec)} | {spec.metadata['help']} |")
    return "\n".join(rows) + "\n"


def _default(spec: dataclasses.Field[object]) -> str:
    if spec.name == "served_model_name":
        return "the model's own name"
    return f"`{shown}`" if (shown := shown_default(spec.name, spec.default)) else "none"


def updated(page: str) -> str:
    for begin, options in TABLES.items():
        before, rest = page.split(begin)
        page = before + begin + option_table(options) + END + rest.split(END, 1)[1]
    return page


def main() -> int:
    page = PAGE.read_text()
    new = updated(page)
    if "--check" in sys.argv:
        return 0 if new == page else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
