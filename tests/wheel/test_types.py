"""A consumer's code is checked against the installed package: types are seen, and a wrong call is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnmux

pytestmark = pytest.mark.skipif(
    "site-packages" not in (attnmux.__file__ or ""), reason="type checkers do not see an editable install; the wheel environment runs these"
)

GOOD = """\
import torch
import attnmux

spec = attnmux.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_size=64, dtype=torch.float32)
routes: dict[str, str] = {str(row_class): backend for row_class, backend in attnmux.select(spec, device="cpu").routes.items()}
attn = attnmux.Attention(spec, limits=attnmux.Limits(max_num_seqs=1, max_num_tokens=1, max_seq_len=16, max_query_len=1))
size: int = attn.workspace_bytes()
"""
BAD = GOOD + "attnmux.select(spec, devise='cpu')\nsize = attn.spec\n"


def checker(name: str) -> list[str]:
    if name == "mypy":
        pytest.importorskip("mypy")
        return [sys.executable, "-m", "mypy", "--strict"]
    found = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if not found or subprocess.run([found, "--version"], capture_output=True, timeout=300, check=False).returncode:
        pytest.skip("pyright is not installed, or cannot get its node runtime here")
    return [found, "--pythonpath", sys.executable]


@pytest.mark.parametrize("name", ["mypy", "pyright"])
def test_types_are_seen(name: str, tmp_path: Path) -> None:
    command = checker(name)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "bad.py").write_text(BAD)
    good = subprocess.run([*command, "good.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout + good.stderr
    bad = subprocess.run([*command, "bad.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert "devise" in bad.stdout
    assert bad.stdout.count("error") >= 2, bad.stdout
