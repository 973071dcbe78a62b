"""The command line in this process, with the real plugins or over a small fake machine room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

import attnmux.plugin as amx
from attnmux.dispatch import host
from attnmux.dispatch.cli import main
from attnmux.dispatch.registry import Registry

Result = tuple[int, str, str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``run("explain", ...)`` -> exit status, standard output, standard error, as a pipe would get them."""
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*argv: str) -> Result:
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


@amx.hookimpl
def attnmux_platforms() -> Iterator[amx.Platform]:
    yield amx.Platform(
        name="lab",
        devices=amx.DeviceSet("cuda"),
        archs={"sm90": amx.Arch("Lab card", 64 * 1024, frozenset({"bf16"}))},
        orders=(
            amx.Order(("beta", "alpha"), "beta decodes faster here", when=amx.when(row_class="decode")),
            amx.Order(("alpha", "beta"), "alpha first"),
        ),
    )


@amx.hookimpl
def attnmux_backends() -> Iterator[amx.BackendInfo]:
    bf16 = amx.OneOf(torch.bfloat16)
    yield amx.BackendInfo(
        name="alpha",
        summary="takes windows",
        implementation=None,
        claims=(
            amx.Claim(
                device=amx.DeviceSet("cuda:sm90"),
                head_size=amx.OneOf(64, 128),
                dtype=bf16,
                page_size=amx.Range(16, 64, of=16),
                sliding_window=amx.ANY,
            ),
        ),
    )
    yield amx.BackendInfo(
        name="beta",
        summary="takes any head size",
        implementation="beta_kernels:Beta",
        requires=(amx.Package("beta-kernels", ">=2"),),
        claims=(amx.Claim(device=amx.DeviceSet("cuda:sm90"), head_size=amx.Range(8, of=8), dtype=bf16, page_size=amx.OneOf(16)),),
        graphs=("decode",),
    )


@pytest.fixture
def lab() -> Iterator[Registry]:
    """Two backends that exist only by declaration, on a card that this machine lacks."""
    plugin = SimpleNamespace(attnmux_contract="1.0", attnmux_platforms=attnmux_platforms, attnmux_backends=attnmux_backends)
    registry = Registry(builtins=("attnmux.platforms.cpu", "attnmux.dispatch.doctor"), entry_points=False)
    registry.register(plugin, "lab")
    with host.using(registry):
        yield registry
