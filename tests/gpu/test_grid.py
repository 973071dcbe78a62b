"""The kernels' own tests, natively: helpers, the feature grid, oracles. In several processes, since most of the time is compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TESTS = Path(__file__).parents[1] / "kernels" / "triton"
SHARDS = max(1, min(12, (os.cpu_count() or 2) - 2))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[subprocess.Popen[str], Path]]]:
    folder = tmp_path_factory.mktemp("shards")
    running = []
    for i in range(SHARDS):
        report = folder / f"{i}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={report}", "--shard", f"{i}/{SHARDS}"]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        process = subprocess.Popen([*command, str(TESTS)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        running.append((process, report))
    yield running
    for process, _ in running:
        process.kill()


@pytest.mark.parametrize("shard", range(SHARDS))
def test_native(shard, shards, record_property):
    process, report = shards[shard]
    said, _ = process.communicate()
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None, said
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    skipped = int(suite.get("skipped", 0))
    for name, count in (("passed", int(suite.get("tests", 0)) - failed - skipped), ("failed", failed), ("skipped", skipped)):
        record_property(name, count)
    assert process.returncode == 0, said
    assert not skipped
