"""Intel GPUs: Xe2 (Arc B-series, Lunar Lake); others go by its rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, Probed
from attnmux.platforms._family import BF16, KIB, triton_first

attnmux_contract = "1.0"

XE2_PCI = re.compile(r"0x(e2[0-9a-f]{2}|64[2ab]0)")
"""PCI device numbers of Battlemage and Lunar Lake."""


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="xpu",
        devices=DeviceSet("xpu"),
        archs={"xe2": Arch("Xe2 (Arc B-series, Lunar Lake)", 128 * KIB, BF16)},
        orders=(
            *triton_first("xpu_kernels"),
            Order(("xpu_kernels", "triton"), "16-bit: vLLM's kernels are tuned for Xe2; Triton takes what they refuse"),
        ),
        probe="attnmux.platforms.xpu:probe",
    )


def probe() -> list[Probed]:
    """The Intel GPUs of this machine, from sysfs.

    A torch built for XPU says how many it can use (it asks the system management interface first, so no context is
    made and ``ZE_AFFINITY_MASK`` counts). Otherwise the Xe2 GPUs that sysfs shows are listed, as present but not usable.
    """
    archs = intel_gpus(Path("/sys/class/drm"))
    return listed(archs, torch.xpu.device_count() if torch.version.xpu else None)


def intel_gpus(drm: Path) -> list[str]:
    """The arch of every Intel GPU in a ``drm`` class folder: ``xe2``, or ``xe`` for another generation."""
    found = []
    for device in sorted(drm.glob("card*/device")):
        try:
            vendor, number = ((device / name).read_text().strip() for name in ("vendor", "device"))
        except OSError:
            continue  # a connector, or a GPU that this process may not see
        if vendor == "0x8086":
            found.append("xe2" if XE2_PCI.fullmatch(number) else "xe")
    return found


def listed(archs: list[str], usable: int | None) -> list[Probed]:
    """What to list, given what sysfs shows and how many devices torch can use (``None``: it has no XPU support)."""
    if usable is None:
        note = f"torch {torch.__version__} is built without XPU and cannot drive it"
        return [Probed("xpu", arch, "Intel Xe2", index, note=note) for index, arch in enumerate(a for a in archs if a == "xe2")]
    if usable != len(archs):  # a mask hides some, and sysfs does not say which
        archs = [archs[0] if len(set(archs)) == 1 else "xe"] * usable
    return [Probed("xpu", arch, "Intel Xe2" if arch == "xe2" else "Intel GPU", index) for index, arch in enumerate(archs)]
