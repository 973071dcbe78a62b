"""From an argument to a Device: names, torch devices and indices, this machine or a dry run, and every refusal."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from fake_plugins import lab, platform, registry

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.device import Device, DeviceSet, sm_version, union
from attnmux.dispatch.devices import known_names, probe_machine, resolve
from attnmux.dispatch.errors import AttnmuxError, UnknownDeviceError
from attnmux.dispatch.platform import Arch, Platform
from attnmux.dispatch.registry import BUILTINS, Registry

GPUS = tuple(Device("cuda", arch, f"board {index}", "lab", real=True, index=index) for index, arch in enumerate(("sm90", "sm80", "sm90")))
CPU = Device("cpu", "x86_64", "the lab's CPU", "cpu", real=True)
MACHINE = (*GPUS, CPU)


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Registry([name for name in BUILTINS if ".platforms." in name], entry_points=False).catalog


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        (None, GPUS[0]),
        ("cuda", GPUS[0]),
        ("cuda:1", GPUS[1]),
        (" CUDA:2 ", GPUS[2]),
        ("cuda:sm90", GPUS[0]),
        ("cuda:sm_90a", GPUS[0]),
        ("cuda:sm80", GPUS[1]),
        (torch.device("cuda"), GPUS[0]),
        (torch.device("cuda", 1), GPUS[1]),
        ("cpu", CPU),
        ("cpu:0", CPU),
        ("cpu:x86_64", CPU),
        (torch.device("cpu"), CPU),
        (torch.device("cpu", 0), CPU),
        (GPUS[2], GPUS[2]),
    ],
    ids=str,
)
def test_what_this_machine_has_is_real(argument: Any, found: Device, catalog: Catalog) -> None:
    assert resolve(argument, catalog, MACHINE) is found


@pytest.mark.parametrize("name", ["cuda:sm100", "rocm:gfx950", "xpu", "mi300", "cpu:aarch64"])
def test_what_it_lacks_is_a_dry_run(name: str, catalog: Catalog) -> None:
    device = resolve(name, catalog, MACHINE)
    assert not device.real
    assert device.index is None
    assert resolve(device.name, catalog, MACHINE).type == device.type


def test_without_devices_the_answer_is_the_cpu_by_name(catalog: Catalog) -> None:
    assert resolve(None, catalog, ()).name == "cpu"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "unknown device '': known: cuda:sm80"),
        ("gpu", "unknown device 'gpu': "),
        ("cud:sm90", "unknown device 'cud:sm90': did you mean 'cuda:sm90'? known: "),
        ("cuda:hopper", "unknown device 'cuda:hopper'"),
        ("cuda:sm9", "unknown device 'cuda:sm9'"),
        ("cuda:sm9000", "unknown device 'cuda:sm9000'"),
        ("cuda:mi300", "unknown device 'cuda:mi300'"),
        ("cuda:gfx942", "unknown device 'cuda:gfx942'"),
        ("rocm:gfx", "unknown device 'rocm:gfx'"),
        ("rocm:sm90", "unknown device 'rocm:sm90'"),
        ("xpu:sm90", "unknown device 'xpu:sm90'"),
        ("cpu:riscv", "unknown device 'cpu:riscv'"),
        ("cpu:1", "unknown device 'cpu:1'"),
        ("cuda:²", "unknown device 'cuda:²'"),
        ("cuda:0", "device 'cuda:0' is not in this machine, which has 0 cuda devices; name an architecture for a dry run"),
        ("xpu:3", "device 'xpu:3' is not in this machine, which has 0 xpu devices"),
        ("cuda", "this machine has no cuda device; name an architecture for a dry run: cuda:sm80"),
        ("rocm:", "this machine has no rocm device; name an architecture for a dry run: rocm:gfx942"),
        (torch.device("cuda", 0), "device 'cuda:0' is not in this machine"),
        (torch.device("mps"), "unknown device 'mps'"),
        (torch.device("meta"), "unknown device 'meta'"),
    ],
    ids=str,
)
def test_refusals_name_the_device_and_what_exists(argument: Any, message: str, catalog: Catalog) -> None:
    with pytest.raises(UnknownDeviceError) as caught:
        resolve(argument, catalog, ())
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, AttnmuxError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("argument", [0, 1.5, ("cuda", 0), b"cpu"], ids=str)
def test_other_types_are_refused(argument: Any, catalog: Catalog) -> None:
    with pytest.raises(TypeError, match=r"wanted a name, a torch\.device or None"):
        resolve(argument, catalog, MACHINE)


def test_a_machine_with_gpus_says_how_many(catalog: Catalog) -> None:
    with pytest.raises(UnknownDeviceError, match="'cuda:3' is not in this machine, which has 3 cuda devices"):
        resolve("cuda:3", catalog, MACHINE)


def test_the_platform_that_lists_an_arch_wins_then_the_pattern_then_the_generic_one() -> None:
    def made(name: str, *, archs: tuple[str, ...] = (), pattern: str = "cuda", generic: bool = False) -> Platform:
        return Platform(name=name, devices=DeviceSet(pattern), archs={a: Arch(a) for a in archs}, orders=(), generic=generic)

    generic, wide, listing = (
        made("a_generic", generic=True),
        made("wide", pattern="cuda:sm80+"),
        made("z_lists", archs=("sm90",), pattern="cuda:sm90"),
    )
    for order in ([generic, wide, listing], [listing, wide, generic]):
        catalog = registry(platforms=order).catalog
        assert resolve("cuda:sm90", catalog, ()).platform == "z_lists"
        assert resolve("cuda:sm91", catalog, ()).platform == "wide"
        assert resolve("cuda:sm75", catalog, ()).platform == "a_generic"


def test_a_device_that_no_platform_recognises_is_refused() -> None:
    catalog = registry(platforms=[platform(name="only", device="cuda", arch="sm90")]).catalog
    with pytest.raises(UnknownDeviceError, match="no platform recognises rocm:gfx942"):
        resolve("rocm:gfx942", catalog, ())
    with pytest.raises(UnknownDeviceError, match="no platform recognises cpu"):
        resolve(None, catalog, ())


def test_a_third_partys_architecture_is_known_by_its_table() -> None:
    catalog = registry(platforms=[platform(name="riscv", arch="riscv64")]).catalog
    assert resolve("cpu:riscv64", catalog, ()).platform == "riscv"
    assert "cpu" in known_names(catalog)


def test_a_probe_is_asked_once_however_many_platforms_share_it() -> None:
    catalog = registry(platforms=[lab(), lab(name="lab_arm", arch="aarch64")]).catalog
    assert [d.title for d in probe_machine(catalog)] == ["the lab's CPU"]


def test_a_probe_that_fails_is_logged_and_the_rest_is_found(caplog: pytest.LogCaptureFixture) -> None:
    broken = platform(name="broken", device="cuda", arch="sm90", probe="fake_plugins:probe_fails")
    with caplog.at_level(logging.WARNING, "attnmux"):
        assert [d.name for d in probe_machine(registry(platforms=[broken, lab()]).catalog)] == ["cpu"]
    assert "probe fake_plugins:probe_fails failed" in caplog.text
    assert "OSError: the driver is on fire" in caplog.text


def test_sm_numbers() -> None:
    assert [sm_version(a) for a in ("sm90", "sm_90a", "sm100f", "gfx942", "sm", "sm9x")] == [90, 90, 100, None, None, None]


def test_torch_names() -> None:
    assert [d.torch_device for d in (GPUS[1], CPU, Device("rocm", "gfx942", "", "", index=2), Device("xpu", "xe2", "", ""))] == [
        "cuda:1",
        "cpu",
        "cuda:2",
        "xpu:0",
    ]
    assert GPUS[1].to_dict()["name"] == "cuda:sm80"


def test_a_union_names_no_arch_twice() -> None:
    patterns = ("cuda:sm80..sm121", "cuda:sm80", "cuda:sm90", "rocm:gfx9*", "rocm:gfx942", "rocm:gfx1100", "cuda:sm80..sm121", "cpu")
    assert union(patterns) == DeviceSet("cuda:sm80..sm121", "rocm:gfx9*", "rocm:gfx1100", "cpu")
    assert union(("cuda:sm90",)) == DeviceSet("cuda:sm90")
