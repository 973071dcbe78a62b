"""The CPU: always there, one device however many sockets it has."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.hookspecs import hookimpl
from attnmux.dispatch.platform import Arch, Order, Platform, Probed

attnmux_contract = "1.0"

MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""What some systems call an architecture -> its name here."""


@hookimpl
def attnmux_platforms() -> Iterable[Platform]:
    yield Platform(
        name="cpu",
        devices=DeviceSet("cpu"),
        archs={"x86_64": Arch("x86-64 CPU"), "aarch64": Arch("64-bit Arm CPU")},
        orders=(
            Order(
                ("ipex", "sdpa", "reference"),
                "IPEX has paged kernels where it is installed, SDPA is torch's fused CPU kernel, the reference takes everything;"
                " Triton's interpreter is for tests and runs where it is required",
            ),
        ),
        probe="attnmux.platforms.cpu:probe",
    )


def probe() -> list[Probed]:
    """This machine's CPU."""
    machine = platform.machine().lower()
    return [Probed("cpu", MACHINES.get(machine, machine), model_name(Path("/proc/cpuinfo")))]


def model_name(cpuinfo: Path) -> str:
    """The product's name, or the architecture where the system does not tell."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
