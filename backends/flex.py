"""torch's FlexAttention: the portable fallback, any mask on any device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from attnmux.backends._claims import HALF, every_mask
from attnmux.backends.triton import TRITON
from attnmux.dispatch.claims import BackendInfo, TestedOn
from attnmux.dispatch.constraints import OneOf, Range
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

CPU = replace(
    every_mask(
        DeviceSet("cpu"),
        head_size=Range(16, 256, of=8),
        dtype=OneOf(*HALF.values, torch.float32),
        # a page is a block of the block mask; NHD only, because an HND pool is no view of one run of keys
        page_size=OneOf(None, 16, 32, 64, 128, 256),
    ),
    lengths=OneOf("exact"),  # the block mask is built when a step is planned
)
CLAIMS = (replace(CPU, device=DeviceSet("cuda", "rocm", "xpu"), requires=(TRITON,)), CPU)  # a CPU runs it uncompiled


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="flex",
        summary="torch FlexAttention: any mask, any device",
        claims=CLAIMS,
        implementation="attnmux.backends.flex_backend:FlexBackend",
        requires=(Package("torch", ">=2.11"),),
        tested_on=(TestedOn("cpu", "CPU", "2026-11-30", "torch 2.13"), TestedOn("cuda:sm90", "H200", "2026-11-30", "torch 2.11, Triton 3.6")),
    )
