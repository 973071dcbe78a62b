"""README and docs, run as written against whatever attnmux is installed: ``console`` blocks in a shell, ``>>>`` blocks as doctests."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_MORE = ("pip install", "tox run", "attnmux demo", "git clone", "pytest")
"""Commands that install things or load a model; other tests and CI run those."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands(page: Path) -> list[tuple[str, str]]:
    found = []
    for block in blocks(page, "console"):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = command[:-1] + more.strip()
            found.append((command, output))
    return found


RUN = [(page.name, command, output) for page in PAGES for command, output in commands(page) if not command.startswith(NEEDS_MORE)]


@pytest.mark.parametrize(("page", "command", "wanted"), RUN, ids=[f"{page}: {command}" for page, command, _ in RUN])
def test_commands_print_what_the_page_shows(page: str, command: str, wanted: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ATTNMUX_")}
    environment |= {"ATTNMUX_CONFIG": "", "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "160"}
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    got = done.stdout + done.stderr
    assert doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS), f"$ {command}\n{got}"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_python_examples(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNMUX_CONFIG", "")
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_there_is_something_to_run() -> None:
    assert len(RUN) >= 3
