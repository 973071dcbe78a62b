"""Intel Extension for PyTorch 2.8, its last version: paged attention on x86 CPUs."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from attnmux.backends._claims import TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, OneOf, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

CLAIMS = (
    Claim(
        device=DeviceSet("cpu:x86_64"),
        row_class=TEXT_ROWS,
        head_size=OneOf(64, 128, 256),
        dtype=OneOf(torch.bfloat16, torch.float32),
        page_size=Range(16, 256, of=16),
        kv_layout=OneOf("HND"),
        sliding_window=ANY,
        softcap=ANY,
        alibi=OneOf(None, "linear"),
    ),
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="ipex",
        summary="Intel Extension for PyTorch: paged attention on x86 CPUs",
        claims=CLAIMS,
        implementation=None,
        # it ends the interpreter's import with an AttributeError under any other torch, so both versions are checked first
        requires=(Package("torch", "==2.8.*", "attnmux[ipex]"), Package("intel-extension-for-pytorch", "==2.8.*", "attnmux[ipex]")),
    )
