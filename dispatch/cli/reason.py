"""``attnmux reason``."""

from __future__ import annotations

import argparse

from attnmux.dispatch.cli import UsageError
from attnmux.dispatch.cli.output import add_json, print_json, print_table
from attnmux.dispatch.errors import suggest
from attnmux.dispatch.reasons import CODES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", nargs="?", help="a reason code, as explain --json shows it (default: all)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.code is not None and args.code not in CODES:
        raise UsageError(f"unknown reason code {args.code!r}: {suggest(args.code, list(CODES))}")
    found = CODES if args.code is None else {args.code: CODES[args.code]}
    if args.json:
        print_json("codes", found)
    elif args.code is not None:
        print(found[args.code])
    else:
        print_table(("code", "meaning"), found.items())
    return 0
