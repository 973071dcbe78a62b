"""AMD GPUs without a module of their own: MI200 (gfx90a), MI350 (gfx950), and any other."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform
from attnmux.platforms._family import BF16, FP8_OCP, KIB

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="rocm_generic",
        devices=DeviceSet("rocm"),
        archs={
            "gfx90a": Arch("CDNA 2 (MI210, MI250)", 64 * KIB, BF16),
            "gfx950": Arch("CDNA 4 (MI350X, MI355X)", 160 * KIB, BF16 | FP8_OCP),
        },
        orders=(Order(("triton",), "Triton compiles for any AMD GPU that ROCm supports"),),
        probe="attnmux.platforms._kfd:probe",
        generic=True,
    )
