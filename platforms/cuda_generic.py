"""NVIDIA GPUs without a module of their own: Turing (sm75), Blackwell for desktops (sm120, sm121), and any other capability."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, when
from attnmux.platforms._family import BF16, FP8_OCP, KIB, spans_first, triton_first

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cuda_generic",
        devices=DeviceSet("cuda"),
        archs={
            "sm75": Arch("Turing (T4, RTX 20)", 64 * KIB),
            "sm120": Arch("Blackwell (RTX 50, RTX PRO)", 99 * KIB, BF16 | FP8_OCP | {"tma"}),
        },
        orders=(
            *triton_first("flashinfer", "flex"),
            Order(
                ("triton", "flex"),
                "Turing: fp16 in Triton's kernels; it has no bf16 arithmetic, so FlexAttention takes the rest",
                when("cuda:sm75..sm79"),
            ),
            spans_first("flashinfer", "flex"),
            Order(
                ("flashinfer", "triton", "flex"),
                "desktop Blackwell runs FlashInfer's fa2; it has neither wgmma nor tcgen05, so FlashAttention has no paged kernel for it",
                when("cuda:sm120..sm129"),
            ),
            Order(("triton", "flex"), "a capability that no table knows: only what compiles for the device at hand"),
        ),
        probe="attnmux.platforms._nvml:probe",
        generic=True,
    )
