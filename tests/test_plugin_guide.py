"""The backend of docs/plugins.md, typed in as written, passes the conformance kit; broken in one place, it does not."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnmux
from attnmux.dispatch import host
from attnmux.dispatch.registry import Registry
from attnmux.testing import check_backend

GUIDE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
DECLARATION, BACKEND, PLACE = re.findall(r"^```python\n(.*?)^```", GUIDE, re.M | re.S)[:3]


@pytest.fixture
def acme(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The guide's plugin in a registry beside the built-ins; a parameter replaces text of the implementation."""
    old, new = getattr(request, "param", ("", ""))
    plugin, implementation = types.ModuleType("acme_attn.plugin"), types.ModuleType("acme_attn")
    exec(DECLARATION + PLACE, vars(plugin))
    assert old in BACKEND
    exec("import torch\nimport attnmux.plugin as amx\n" + BACKEND.replace(old, new), vars(implementation))
    monkeypatch.setitem(sys.modules, "acme_attn", implementation)
    registry = Registry(entry_points=False)
    registry.register(plugin, "acme")
    with host.using(registry):
        yield registry


def test_the_guides_backend_passes_the_kit(acme: Registry) -> None:
    report = check_backend("acme", "cpu", quick=True)
    assert report.ok, report
    assert len(report.results) > 20


@pytest.mark.parametrize(
    "acme", [("k_cache[pages, keys", "k_cache[pages, 0 * keys"), (" * self.spec.scale", "")], indirect=True, ids=["offsets", "scale"]
)
def test_the_kit_sees_when_the_guides_backend_is_broken(acme: Registry) -> None:
    assert not check_backend("acme", "cpu", quick=True).ok


def test_the_guides_backend_stands_where_it_says(acme: Registry) -> None:
    spec = attnmux.AttentionSpec(8, 2, 64, "fp32")
    assert attnmux.select(spec, "cpu").routes == {"prefill": "sdpa", "decode": "acme"}
    assert "measured 2026-11" in attnmux.select(spec, "cpu").explain()
    assert attnmux.select(spec.replace(sinks=True), "cpu").routes == {"prefill": "sdpa", "decode": "sdpa"}
