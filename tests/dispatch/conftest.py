"""Clean settings for every test here, and registries put in place of the process's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from attnmux.dispatch import config, host
from attnmux.dispatch.device import Device
from attnmux.dispatch.registry import Registry
from attnmux.dispatch.spec import AttentionSpec

FAKES = Path(__file__).parents[1] / "fakes"
sys.path.append(str(FAKES))  # for `import fake_plugins`


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No ``ATTNMUX_*`` variable and no file of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("ATTNMUX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNMUX_CONFIG", "")
    config.base.cache_clear()
    yield
    config.base.cache_clear()


@pytest.fixture
def install() -> Iterator[Callable[[Registry], Registry]]:
    """Puts a registry in place of the process's own for one test."""
    with ExitStack() as stack:
        yield lambda registry: stack.enter_context(host.using(registry))


@pytest.fixture
def spec() -> AttentionSpec:
    return AttentionSpec(num_q_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, page_size=4)


@pytest.fixture
def cpu() -> Device:
    """A CPU that this machine has, for the pure selector."""
    return Device("cpu", "x86_64", "the lab's CPU", "lab_cpu", real=True)


@pytest.fixture
def sm90() -> Device:
    """A GPU known by name only, recognised by a platform named ``lab_sm90``."""
    return Device("cuda", "sm90", "the lab's GPU", "lab_sm90")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes the fake distributions installed: ``site("site")``, or both with ``site("site", "second")``."""
    before = set(sys.modules)

    def install_folders(*folders: str) -> None:
        for folder in folders:
            monkeypatch.syspath_prepend(str(FAKES / folder))

    yield install_folders
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("fake_attn", "fake_twin"):
            del sys.modules[name]
