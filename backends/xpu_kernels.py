"""vllm-xpu-kernels: FlashAttention-2 for Intel's Xe2."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from attnmux.backends._claims import HALF, TEXT_ROWS
from attnmux.dispatch.claims import BackendInfo, Claim
from attnmux.dispatch.constraints import ANY, ON, OneOf
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.requirements import Package

attnmux_contract = "1.0"

# Claimed is what its default build compiles: anything else runs in a slow loop, which also drops ALiBi slopes.
PLAIN = Claim(
    device=DeviceSet("xpu"),
    row_class=TEXT_ROWS,
    head_size=OneOf(64, 128, 192),
    dtype=HALF,
    page_size=OneOf(16, 32, 64),
)
CLAIMS = (
    PLAIN,
    replace(PLAIN, head_size=OneOf(128, 256), page_size=OneOf(16, 64), sliding_window=ANY),
    replace(PLAIN, head_size=OneOf(64), page_size=OneOf(64), sliding_window=ANY, sinks=ON),
)


@hookimpl
def attnmux_backends() -> Iterable[BackendInfo]:
    yield BackendInfo(
        name="xpu_kernels",
        summary="vLLM's FlashAttention-2 for Intel Xe2",
        claims=CLAIMS,
        implementation=None,
        requires=(Package("vllm-xpu-kernels", ">=0.1.16"),),
    )
