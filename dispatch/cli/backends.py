"""``attnmux backends``."""

from __future__ import annotations

import argparse
import dataclasses

from attnmux.dispatch import host
from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.cli.output import add_json, print_json, print_table
from attnmux.dispatch.devices import resolve
from attnmux.dispatch.matrix import COLUMNS, MatrixRow, columns, markdown, matrix, run_state

GROUPS: dict[str, tuple[str, ...]] = {
    "where": ("devices", "rows"),
    "sizes": ("head size", "dtype", "cache", "page", "layout"),
    "masks and scores": ("types", "causal", "features"),
}
"""Twelve columns do not fit a screen: those of the matrix that share one here, a line each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="DEVICE", help="only claims for this device")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/support.md")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    catalog = host.registry().catalog
    if args.device is not None:
        catalog = _only(catalog, args.device)
    if args.json:
        print_json("backends", _to_dicts(catalog))
    elif args.markdown:
        print(markdown(catalog), end="")
    else:
        print_table(("backend", *GROUPS, "state"), [_cells(row) for row in matrix(catalog)], lines=True)
    return 0


def _only(catalog: Catalog, name: str) -> Catalog:
    device = resolve(name, catalog, host.devices())
    kept = {n: tuple(claim for claim in info.claims if device in claim.device) for n, info in catalog.backends.items()}
    backends = {n: dataclasses.replace(info, claims=kept[n]) for n, info in catalog.backends.items() if kept[n]}
    return dataclasses.replace(catalog, backends=backends)


def _cells(row: MatrixRow) -> tuple[str, ...]:
    cells: dict[str, str] = dict(zip(COLUMNS, columns(row), strict=True))
    grouped = ("\n".join(f"{name}: {cells[name]}" for name in names if cells[name]) for names in GROUPS.values())
    return cells["backend"], *grouped, cells["state"]


def _to_dicts(catalog: Catalog) -> list[dict[str, object]]:
    claims: dict[str, list[dict[str, str]]] = {}
    for row in matrix(catalog):
        claims.setdefault(row.backend, []).append(row.cells)
    return [
        {"name": name, "summary": info.summary, "plugin": catalog.providers[name], "state": run_state(info), "claims": claims[name]}
        for name, info in catalog.backends.items()
    ]
