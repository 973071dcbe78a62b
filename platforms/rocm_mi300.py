"""AMD's MI300 family: gfx942."""

from __future__ import annotations

from collections.abc import Iterable

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform
from attnmux.platforms._family import BF16, FP8_FNUZ, KIB

attnmux_contract = "1.0"


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="rocm_mi300",
        devices=DeviceSet("rocm:gfx94*"),
        archs={"gfx942": Arch("CDNA 3 (MI300A, MI300X, MI325X)", 64 * KIB, BF16 | FP8_FNUZ, aliases=("mi300",))},
        orders=(Order(("triton",), "Triton covers every feature; AITER's only wheel is a snapshot of 2025-11, so it runs where it is named"),),
        probe="attnmux.platforms._kfd:probe",
    )
