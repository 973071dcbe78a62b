"""``attnmux doctor``. It has to work where little else does: what cannot be loaded becomes a finding."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from attnmux.dispatch.cli.output import add_json, console, print_json
from attnmux.dispatch.errors import ConfigError
from attnmux.dispatch.health import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Report = list[tuple[str, Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    report = examine_all()
    healthy = all(finding.status != "fail" for _, finding in report)
    if args.json:
        print_json("doctor", {"ok": healthy, "findings": [{"check": name, **asdict(finding)} for name, finding in report]})
    else:
        _print(report)
    return 0 if healthy else 1


def examine_all() -> Report:
    """Every health check, built-in and of plugins."""
    try:
        from attnmux.dispatch import host
        from attnmux.dispatch.doctor import examine
    except (ImportError, OSError) as error:
        return _without_torch(error)
    try:
        checks = host.registry().catalog.health_checks
    except ConfigError as error:
        finding = Finding("fail", str(error), "correct it; the other findings are without any configuration")
        with _no_configuration():
            rest = [check for check in host.registry().catalog.health_checks if check.name != "configuration"]
            return [("configuration", finding), *examine(rest)]
    return examine(checks)


def _without_torch(error: Exception) -> Report:
    """What can be said when the contract itself does not import."""
    from attnmux.dispatch.requirements import Package

    report: Report = [("import", Finding("fail", f"attnmux does not import: {type(error).__name__}: {error}"))]
    for package in (Package("torch", ">=2.8"), Package("pluggy", ">=1.7"), Package("packaging", ">=23")):
        found = package.probe()
        missing = package.judge(None) if found is None else None
        report.append(("versions", Finding("fail", str(missing), missing.todo) if missing else Finding("ok", f"{package.name} {found}")))
    return report


@contextmanager
def _no_configuration() -> Iterator[None]:
    """Inside, the process has no settings but the list of disabled plugins."""
    from attnmux.dispatch.config import reload_config

    kept = {name: value for name, value in os.environ.items() if name.startswith("ATTNMUX_")}
    for name in kept.keys() - {"ATTNMUX_DISABLE_PLUGINS"}:
        del os.environ[name]
    os.environ["ATTNMUX_CONFIG"] = ""
    try:
        reload_config()
        yield
    finally:
        del os.environ["ATTNMUX_CONFIG"]
        os.environ.update(kept)
        reload_config()


def _print(report: Report) -> None:
    from rich.text import Text

    screen, last = console(), ""
    for name, finding in report:
        if name != last:
            screen.print(Text(name, style="bold"))
            last = name
        mark = Text(f"  {finding.status:4s}  ", style=_STYLES[finding.status])
        screen.print(mark + Text(finding.text))
        if finding.hint:
            screen.print(Text(f"        {finding.hint}", style="dim"))
