#!/usr/bin/env python3
"""Writes the tables of docs/conformance.md: all checks, and what became of them with each server.

    python scripts/conformance_table.py "Noria=noria.json" "vLLM 0.32 (CPU)=vllm.json"

The files are what `noria conformance URL --json` printed. A column that is there already is replaced, others stay as
they are; a check that a server was not asked has an empty cell. Without files, the list of checks is brought up to
date. `--check` writes nothing and says, by its exit code, whether the page lists exactly the checks that there are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from noria.conformance.catalogue import CHECKS
from noria.conformance.contract import Outcome, Source

PAGE = Path(__file__).parent.parent / "docs" / "conformance.md"
TABLE, COUNTS, END = "<!-- checks -->\n", "<!-- counts -->\n", "<!-- end -->"
GROUPS = {
    "standards": [source for source in Source if source not in (Source.EXTENSION, Source.OURS)],
    "common extensions": [Source.EXTENSION],
    "our own choices": [Source.OURS],
}
Columns = dict[str, dict[str, str]]
"""Server to check to outcome."""


def columns_of(page: str) -> Columns:
    """Those that the page's table has."""
    lines = page.split(TABLE)[1].split(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    if not rows:
        return {}
    header, _, *body = rows
    return {name: {row[0].strip("`"): row[at] for row in body} for at, name in enumerate(header) if at > 2}


def read_results(path: str) -> dict[str, str]:
    """From the last line of a file, as the command leaves it."""
    results = json.loads(Path(path).read_text().splitlines()[-1])
    return {check["name"]: check["outcome"] for check in results["checks"]}


def check_table(columns: Columns) -> str:
    names = "".join(f" {name} |" for name in columns)
    rows = [f"| check | what is expected | source |{names}", "|---|---|---|" + "---|" * len(columns)]
    for check in CHECKS:
        outcomes = "".join(f" {column.get(check.name, '')} |" for column in columns.values())
        rows.append(f"| `{check.name}` | {check.expected} | {check.source} |{outcomes}")
    return "\n".join(rows) + "\n"


def count_table(columns: Columns) -> str:
    """For each server and group of sources: passed, failed, not supported."""
    rows = ["| | checks |" + "".join(f" {name} |" for name in columns), "|---|---|" + "---|" * len(columns)]
    for group, sources in GROUPS.items():
        names = [check.name for check in CHECKS if check.source in sources]
        cells = [
            ", ".join(f"{sum(column.get(name) == outcome for name in names)} {outcome}" for outcome in Outcome)
            for column in columns.values()
        ]
        rows.append(f"| {group} | {len(names)} |" + "".join(f" {cell} |" for cell in cells))
    return "\n".join(rows) + "\n"


def updated(page: str, columns: Columns) -> str:
    for begin, table in ((COUNTS, count_table(columns)), (TABLE, check_table(columns))):
        before, rest = page.split(begin)
        page = before + begin + table + END + rest.split(END, 1)[1]
    return page


def main(arguments: list[str]) -> int:
    page = PAGE.read_text()
    columns = columns_of(page)
    for argument in arguments:
        if argument != "--check":
            name, _, path = argument.partition("=")
            columns[name] = read_results(path)
    new = updated(page, columns)
    if "--check" in arguments:
        return 0 if new == page else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
