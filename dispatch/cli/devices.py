"""``attnmux devices``."""

from __future__ import annotations

import argparse

from attnmux.dispatch import host
from attnmux.dispatch.cli.output import add_json, print_json, print_table
from attnmux.dispatch.device import Device
from attnmux.dispatch.devices import known_names, resolve

COLUMNS = ("name", "title", "platform", "index", "shared memory", "features", "notes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--known", action="store_true", help="list what can be asked about in a dry run instead")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    catalog = host.registry().catalog
    found = [resolve(name, catalog, ()) for name in known_names(catalog)] if args.known else list(host.devices())
    if args.json:
        print_json("devices", [device.to_dict() for device in found])
    else:
        print_table(COLUMNS, [_row(device) for device in found], right=("index", "shared memory"))
    return 0


def _row(device: Device) -> tuple[str, ...]:
    memory = f"{device.shared_memory // 1024} KiB" if device.shared_memory else ""
    index = "" if device.index is None else str(device.index)
    return device.name, device.title, device.platform, index, memory, " ".join(sorted(device.features)), "; ".join(device.notes)
