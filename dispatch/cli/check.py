"""``attnmux check``."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from attnmux.dispatch import host
from attnmux.dispatch.cli.output import add_json, console, print_json, print_table
from attnmux.testing.check import Report, Result
from attnmux.testing.kit import check_backend, subject_of

COLUMNS = ("backend", "device", "checks", "passed", "failed", "skipped", "seconds")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help="check this one (repeatable; default: all that can run here)")
    parser.add_argument("--device", metavar="DEVICE", help="check on this device (default: for each backend the first it can run on)")
    parser.add_argument("--quick", action="store_true", help="each size and feature alone, fewer combinations")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all inputs (default: 0)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    names = args.backend or list(host.registry().catalog.backends)
    stopped = {name: subject.stopped for name in names if (subject := subject_of(name, args.device)).stopped}
    reports = [_check(name, args) for name in names if args.backend or name not in stopped]
    # who names a backend wants it run: that its declaration alone is fine is no success
    good = bool(reports) and all(report.ok and not report.stopped for report in reports)
    if args.json:
        print_json("check", {"ok": good, "reports": [report.to_dict() for report in reports], "not_run": stopped})
    else:
        _print(reports, stopped)
    return 0 if good else 1


def _check(name: str, args: argparse.Namespace) -> Report:
    screen = console(stderr=True)
    with screen.status(name) if screen.is_terminal and not args.json else nullcontext() as status:

        def progress(result: Result) -> None:
            if status is not None:
                status.update(f"{name}: {result.check.id}")

        return check_backend(name, args.device, quick=args.quick, seed=args.seed, progress=progress)


def _print(reports: list[Report], stopped: dict[str, str]) -> None:
    rows = []
    for report in reports:
        for concern in dict.fromkeys(result.check.concern for result in report.results):
            counts = [report.count(status, concern) for status in ("passed", "failed", "skipped")]
            seconds = sum(r.seconds for r in report.results if r.check.concern == concern)
            rows.append((report.backend, report.device, concern, *map(str, counts), f"{seconds:.1f}"))
    print_table(COLUMNS, rows, right=COLUMNS[3:])
    for report in reports:
        for result in report.failures:
            print(f"FAILED {report.backend} {result.check.id}: {result.detail}")
    for name, why in stopped.items():
        print(f"not run: {name}: {why}")
