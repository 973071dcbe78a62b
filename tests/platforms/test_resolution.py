"""Every named architecture finds its platform; limits come from the data sheet or, with a note, from the nearest one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.devices import _device, known_names, resolve
from attnmux.dispatch.errors import UnknownDeviceError
from attnmux.dispatch.platform import Probed
from attnmux.dispatch.registry import BUILTINS, Registry

KIB = 1024
NAMED = [
    # device, platform, shared memory in KiB, a feature it has, a feature it lacks
    ("cuda:sm75", "cuda_generic", 64, None, "bf16"),
    ("cuda:sm80", "cuda_sm80", 163, "bf16", "fp8_e4m3fn"),
    ("cuda:sm86", "cuda_sm80", 99, "bf16", "fp8_e4m3fn"),
    ("cuda:sm89", "cuda_sm80", 99, "fp8_e4m3fn", "tma"),
    ("cuda:sm90", "cuda_sm90", 227, "wgmma", "tcgen05"),
    ("cuda:sm100", "cuda_sm100", 227, "tcgen05", "wgmma"),
    ("cuda:sm120", "cuda_generic", 99, "tma", "tcgen05"),
    ("rocm:gfx90a", "rocm_generic", 64, "bf16", "fp8_e4m3fnuz"),
    ("rocm:gfx942", "rocm_mi300", 64, "fp8_e4m3fnuz", "fp8_e4m3fn"),
    ("rocm:gfx950", "rocm_generic", 160, "fp8_e4m3fn", "fp8_e4m3fnuz"),
    ("xpu", "xpu", 128, "bf16", "tma"),
    ("cpu", "cpu", 0, None, "bf16"),
]
NEAREST = [
    ("cuda:sm70", "cuda_generic", "sm75"),
    ("cuda:sm87", "cuda_sm80", "sm86"),
    ("cuda:sm103", "cuda_sm100", "sm100"),
    ("cuda:sm110", "cuda_sm100", "sm100"),
    ("cuda:sm121", "cuda_generic", "sm120"),
    ("cuda:sm150", "cuda_generic", "sm120"),
    ("rocm:gfx940", "rocm_mi300", "gfx942"),
    ("rocm:gfx1100", "rocm_generic", "gfx90a"),
]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Registry([name for name in BUILTINS if ".platforms." in name], entry_points=False).catalog


@pytest.mark.parametrize(("name", "platform", "shared", "has", "lacks"), NAMED)
def test_named_architectures(name: str, platform: str, shared: int, has: str | None, lacks: str, catalog: Catalog) -> None:
    device = resolve(name, catalog, ())
    assert (device.name, device.platform, device.shared_memory) == (name, platform, shared * KIB)
    assert has is None or has in device.features
    assert lacks not in device.features
    assert not device.notes


@pytest.mark.parametrize(("name", "platform", "nearest"), NEAREST)
def test_others_go_by_their_nearest(name: str, platform: str, nearest: str, catalog: Catalog) -> None:
    device = resolve(name, catalog, ())
    known = next(p.archs[nearest] for p in catalog.platforms.values() if nearest in p.archs)
    assert (device.platform, device.shared_memory, device.features) == (platform, known.shared_memory, known.features)
    assert f"limits of {nearest}" in device.notes[0]


def test_mi300_is_gfx942(catalog: Catalog) -> None:
    assert resolve("mi300", catalog, ()) == resolve("rocm:mi300", catalog, ()) == resolve("rocm:gfx942", catalog, ())


def test_the_tables_hold_what_the_documentation_names(catalog: Catalog) -> None:
    assert set(known_names(catalog)) == {row[0] for row in NAMED}


@pytest.mark.parametrize("name", ["cuda:gfx942", "rocm:sm90", "tpu", "cuda:sm9x"])
def test_nonsense_is_refused_with_what_exists(name: str, catalog: Catalog) -> None:
    with pytest.raises(UnknownDeviceError, match="cuda:sm90"):
        resolve(name, catalog, ())


def test_a_device_that_torch_cannot_drive_is_listed_but_not_chosen(catalog: Catalog) -> None:
    idle = _device(catalog, "cuda", "sm90", Probed("cuda", "sm90", "H200", 0, note="torch is built without CUDA"))
    cpu = _device(catalog, "cpu", "x86_64", Probed("cpu", "x86_64", "EPYC"))
    assert not idle.real
    assert idle.notes == ("torch is built without CUDA",)
    assert resolve(None, catalog, (idle, cpu)) == cpu
    assert resolve("cuda", catalog, (idle, cpu)) == idle
    assert resolve(None, catalog, (replace(idle, real=True), cpu)).type == "cuda"
