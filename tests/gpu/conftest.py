"""Tests that need a CUDA GPU. ``--gpu-summary PATH`` writes what ran, where and with which versions."""

from __future__ import annotations

import collections
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import date
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-summary", metavar="PATH", type=Path, help="write a summary of the run as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") in ("load", "worksteal", "each"):
        raise pytest.UsageError("tests/gpu in several processes needs --dist loadfile: each process would start all of test_grid.py's own")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("gpu_summary", None)
    if path is None or not torch.cuda.is_available():
        return
    import triton

    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            inside = dict(report.user_properties)  # counts of a pytest run inside the test
            for what, count in inside.items() or [(outcome, 1)]:
                counts[report.nodeid.partition("::")[0]][what] += int(count)
    name = torch.cuda.get_device_name()
    lines = [
        "# On a GPU",
        "",
        f"`pytest tests/gpu` on {date.today().isoformat()}: {name}, CUDA {torch.version.cuda}, torch {torch.__version__}, Triton "
        f"{triton.__version__}, Python {platform.python_version()}, {sys.platform}.",
        "",
        "| tests | passed | failed | skipped |",
        "|---|---|---|---|",
    ]
    for where, found in sorted(counts.items()):
        lines.append(f"| {where} | {found['passed']} | {found['failed'] + found['error']} | {found['skipped']} |")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def no_synchronisation() -> Callable[[], AbstractContextManager[None]]:
    """``with no_synchronisation():`` whatever waits for the device raises, as far as torch knows of it."""

    @contextmanager
    def strict() -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield
