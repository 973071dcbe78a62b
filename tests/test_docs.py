"""Hooks, reason codes and generated pages: what is written agrees with what is there."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import attnmux.plugin as amx
from attnmux.dispatch import hookspecs
from attnmux.dispatch.config import VARIABLES
from attnmux.dispatch.matrix import markdown, overview
from attnmux.dispatch.reasons import CODES
from attnmux.dispatch.registry import _HOOK_TYPES, Registry

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "attnmux_spec")]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def example_of(hook: str) -> str:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    return textwrap.dedent(text.partition(".. code-block:: python")[2].partition("Returns:")[0])


def test_the_hooks_are_what_the_registry_reads() -> None:
    assert list(_HOOK_TYPES) == HOOKS


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_what_it_is_for_with_an_example_and_a_result(hook: str) -> None:
    text = inspect.getdoc(getattr(hookspecs, hook)) or ""
    assert re.match(r"[A-Z][^\n]+\.", text)
    assert "**Example:**\n" in text
    assert re.search(r"^Returns:\n    \w", text, re.M)
    assert inspect.signature(getattr(hookspecs, hook)).parameters == {}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_example_of_every_hook_works(hook: str) -> None:
    names: dict[str, Any] = {"amx": amx, "torch": torch}
    exec(example_of(hook), names)
    declared = list(names[hook]())
    assert declared
    assert all(isinstance(item, _HOOK_TYPES[hook]) for item in declared)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_in_the_guide_with_what_it_yields_and_is_tested(hook: str) -> None:
    assert f"| `{hook}` | `{_HOOK_TYPES[hook].__name__}` |" in page("plugins.md")
    fakes = "".join(path.read_text() for path in (ROOT / "tests/fakes").rglob("*.py"))
    assert f"def {hook}(" in fakes or f'"{hook}"' in fakes


def test_every_reason_code_is_explained() -> None:
    assert [tuple(row) for row in re.findall(r"^\| `([\w-]+)` \| (.+?) \|", page("reasons.md"), re.M)] == list(CODES.items())


def test_the_support_table_is_what_the_backends_declare() -> None:
    assert page("support.md").endswith(markdown(Registry(entry_points=False).catalog)), "run: attnmux backends --markdown"


def test_every_variable_is_in_the_guide() -> None:
    named = set(re.findall(r"ATTNMUX_[A-Z_]+", page("configuration.md")))
    assert named == set(VARIABLES)


def links() -> Iterator[tuple[Path, str]]:
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", path.read_text(encoding="utf-8")):
            yield path, target


def test_links_between_pages_lead_somewhere() -> None:
    broken = [f"{path.name}: {target}" for path, target in links() if not (path.parent / target).exists()]
    assert not broken
    assert list(links())


def test_the_readmes_table_is_made_from_the_declarations() -> None:
    assert overview(Registry(entry_points=False).catalog) in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readmes_plugin_is_the_guides() -> None:
    first = re.search(r"^```python\n.*?^```\n", page("plugins.md"), re.M | re.S)
    assert first is not None
    assert first[0] in (ROOT / "README.md").read_text(encoding="utf-8")
