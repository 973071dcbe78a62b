"""Ampere and Ada: sm80, sm86, sm89 and what lies between.

One module for the three: FlashInfer's fa2 is written for their ``mma.sync`` and ``cp.async``, neither has Hopper's
``wgmma`` or TMA, so the orders are the same. They differ in limits only (shared memory; fp8 arithmetic from sm89 on).
"""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform
from attnmux.platforms._family import BF16, FP8_OCP, KIB, sinks_before_hopper, spans_first, triton_first

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cuda_sm80",
        devices=DeviceSet("cuda:sm80..sm89"),
        archs={
            "sm80": Arch("Ampere (A100)", 163 * KIB, BF16),
            "sm86": Arch("Ampere (A10, A40, RTX 30)", 99 * KIB, BF16),
            "sm89": Arch("Ada (L4, L40, RTX 40)", 99 * KIB, BF16 | FP8_OCP),
        },
        orders=(
            *triton_first("flashinfer", "flex"),
            sinks_before_hopper("flashinfer", "flex"),
            spans_first("flashinfer", "flex"),
            Order(("flashinfer", "triton", "flex"), "FlashInfer's fa2 is made for Ampere and Ada; Triton takes what it refuses"),
        ),
        probe="attnmux.platforms._nvml:probe",
    )
