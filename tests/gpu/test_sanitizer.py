"""compute-sanitizer over a small run: no access out of bounds, no race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer (part of the CUDA toolkit)"),
]
TESTS = Path(__file__).parents[1] / "kernels" / "triton"


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_clean(tool):
    command = [str(SANITIZER), "--tool", tool, "--error-exitcode", "99"]
    inner = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--shard", "0/24", str(TESTS / "test_attention.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # each tensor its own allocation
    done = subprocess.run([*command, *inner], env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("compute-sanitizer does not support this device here")
    assert done.returncode == 0, said[-6000:]
    assert "ERROR SUMMARY: 0 errors" in said or "RACECHECK SUMMARY: 0 hazards" in said, said[-2000:]
