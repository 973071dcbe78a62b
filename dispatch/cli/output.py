"""Printing: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 100_000
"""Lines are not cut where no screen is: a program reads them."""


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON; keys stay, 'version' changes when the form does")


def print_json(kind: str, value: Any) -> None:
    """``{"version": 1, kind: value}``."""
    print(json.dumps({"version": 1, kind: value}, indent=2))


def console(*, stderr: bool = False) -> Console:
    """Rich's console: colours where NO_COLOR and the terminal allow them, whole lines where there is no terminal."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), lines: bool = False) -> None:
    """A table with a header and no frame; ``right`` names columns of numbers, ``lines`` separates rows of several lines."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", show_lines=lines)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console().print(table)
