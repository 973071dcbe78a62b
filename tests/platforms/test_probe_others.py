"""Listing AMD and Intel GPUs and the CPU. Fake sysfs trees stand in for the hardware, which CI does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from attnmux.dispatch.platform import Probed
from attnmux.platforms import _kfd, cpu, xpu

CPU_NODE = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"


def kfd(root: Path, *gpus: tuple[int, str]) -> Path:
    """A topology with one CPU node and GPU nodes of the given ``gfx_target_version`` and ``unique_id``."""
    for index, text in enumerate([CPU_NODE, *(_gpu(*gpu) for gpu in gpus)]):
        (root / str(index)).mkdir(parents=True)
        (root / str(index) / "properties").write_text(text)
    return root


def _gpu(version: int, unique_id: str) -> str:
    return f"cpu_cores_count 0\nsimd_count 1216\nlds_size_in_kb 64\ngfx_target_version {version}\nunique_id {int(unique_id, 16)}\n"


@pytest.fixture
def rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")


@pytest.mark.usefixtures("rocm_build")
def test_rocm_architectures(tmp_path: Path) -> None:
    versions = {90402: "gfx942", 90010: "gfx90a", 90500: "gfx950", 110000: "gfx1100", 120001: "gfx1201"}
    nodes = kfd(tmp_path, *((version, f"{i + 1:x}") for i, version in enumerate(versions)))
    found = _kfd.gpus(nodes, {})
    assert [p.arch for p in found] == list(versions.values())
    assert found[0] == Probed("rocm", "gfx942", "AMD gfx942", 0, 64 * 1024)


@pytest.mark.usefixtures("rocm_build")
def test_nodes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    nodes = kfd(tmp_path, *[(90402, "1")] * 9, (90500, "2"))
    assert [p.arch for p in _kfd.gpus(nodes, {})] == ["gfx942"] * 9 + ["gfx950"]


@pytest.mark.usefixtures("rocm_build")
@pytest.mark.parametrize(
    ("environ", "archs"),
    [
        ({}, ["gfx942", "gfx90a", "gfx950"]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "2,0"}, ["gfx950", "gfx942"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx90a"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx942"]),
        ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, ["gfx950"]),  # the second counts within the first
        ({"ROCR_VISIBLE_DEVICES": "GPU-beef"}, ["gfx950"]),
        ({"ROCR_VISIBLE_DEVICES": "5"}, []),
    ],
)
def test_rocm_visible_devices(environ: dict[str, str], archs: list[str], tmp_path: Path) -> None:
    nodes = kfd(tmp_path, (90402, "cafe"), (90010, "f00d"), (90500, "beef"))
    found = _kfd.gpus(nodes, environ)
    assert [p.arch for p in found] == archs
    assert [p.index for p in found] == list(range(len(archs)))


def test_rocm_without_driver_or_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert _kfd.gpus(tmp_path / "none", {}) == []
    assert "without ROCm" in _kfd.gpus(kfd(tmp_path, (90402, "1")), {})[0].note


def drm(root: Path, **cards: tuple[str, str]) -> Path:
    for card, (vendor, device) in cards.items():
        folder = root / card / "device"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    return root


def test_intel_gpus(tmp_path: Path) -> None:
    cards = {
        "card0": ("0x8086", "0xe20b"),  # Arc B580
        "card1": ("0x10de", "0x2330"),  # not Intel's
        "card2": ("0x8086", "0x64a0"),  # Lunar Lake
        "card3": ("0x8086", "0x56a0"),  # Arc A770, the generation before
    }
    (tmp_path / "card0-DP-1").mkdir()
    assert xpu.intel_gpus(drm(tmp_path, **cards)) == ["xe2", "xe2", "xe"]
    assert xpu.intel_gpus(tmp_path / "none") == []


def test_xpu_listing() -> None:
    absent = xpu.listed(["xe2", "xe"], None)
    assert [(p.arch, p.index) for p in absent] == [("xe2", 0)]
    assert "without XPU" in absent[0].note
    assert [(p.arch, p.index, p.note) for p in xpu.listed(["xe2", "xe"], 2)] == [("xe2", 0, ""), ("xe", 1, "")]
    assert [p.arch for p in xpu.listed(["xe2", "xe2"], 1)] == ["xe2"]
    assert [p.arch for p in xpu.listed(["xe2", "xe"], 1)] == ["xe"]
    assert [p.arch for p in xpu.listed([], 1)] == ["xe"]
    assert xpu.listed(["xe2"], 0) == []


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64")])
def test_cpu(machine: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.platform, "machine", lambda: machine)
    (found,) = cpu.probe()
    assert (found.type, found.arch, found.index) == ("cpu", arch, None)
    assert found.title


def test_cpu_model_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654\nmodel name\t: second\n")
    assert cpu.model_name(cpuinfo) == "AMD EPYC 9654"
    assert cpu.model_name(tmp_path / "none")
