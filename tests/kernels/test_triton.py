"""Runs the kernels' tests under Triton's interpreter, each module in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")
MODULES = sorted((Path(__file__).parent / "triton").glob("test_*.py"))
SHARDS = {"test_attention": 3}
RUNS = [(module, f"{i}/{n}") for module in MODULES for n in (SHARDS.get(module.stem, 1),) for i in range(n)]


@pytest.mark.parametrize(("module", "shard"), RUNS, ids=lambda value: getattr(value, "stem", value))
def test_interpreted(module: Path, shard: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-W",
        "ignore::RuntimeWarning",
        str(module),
    ]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)
    summary = done.stdout.strip().splitlines()[-1:] or [done.stderr]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in summary[0], summary
