"""``attnmux explain``."""

from __future__ import annotations

import argparse
import json

from attnmux.dispatch import host
from attnmux.dispatch.cli.output import add_json
from attnmux.dispatch.cli.spec_options import add_spec_arguments, add_steering_arguments, spec_from, steering_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_spec_arguments(parser)
    add_steering_arguments(parser)
    parser.add_argument(
        "--lengths", choices=("exact", "upper_bound"), default="exact", help="what the host's key lengths will promise (default: exact)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    selection = host.answer(spec_from(args), args.device, lengths=args.lengths, **steering_from(args))
    print(json.dumps(selection.to_dict(), indent=2) if args.json else selection.explain())
    return 0 if selection.complete else 1
