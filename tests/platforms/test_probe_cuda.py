"""Listing NVIDIA GPUs. A double stands in for NVML: the driver cannot be had in CI, and MIG or mixed machines nowhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attnmux.dispatch.platform import Probed
from attnmux.platforms import _nvml
from attnmux.platforms._family import visible


@dataclass
class Gpu:
    uuid: str
    name: str
    capability: tuple[int, int]
    mig: list[Gpu] = field(default_factory=list)
    open: bool = True


class FakeNvml:
    """The part of NVML's C interface that is used, writing through the pointers it is given."""

    def __init__(self, *gpus: Gpu, init: int = 0) -> None:
        self._handles = [handle for gpu in gpus for handle in (gpu, *gpu.mig)]
        self._gpus = gpus
        self._init = init
        self.running = 0

    def _of(self, handle: Any) -> Gpu:
        return self._handles[handle.value - 1]

    def _point(self, out: Any, gpu: Gpu) -> int:
        out._obj.value = next(i for i, h in enumerate(self._handles) if h is gpu) + 1
        return 0

    def nvmlInit_v2(self) -> int:
        self.running += self._init == 0
        return self._init

    def nvmlShutdown(self) -> int:
        self.running -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        out._obj.value = len(self._gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, out: Any) -> int:
        gpu = self._gpus[index]
        return self._point(out, gpu) if gpu.open else 4

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._of(handle).capability
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        if self._of(handle).capability < (8, 0):
            return 3
        current._obj.value = bool(self._of(handle).mig)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, out: Any) -> int:
        out._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int, out: Any) -> int:
        instances = self._of(handle).mig
        return self._point(out, instances[index]) if index < len(instances) else 6

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = self._of(handle).uuid.encode()
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: int) -> int:
        buffer.value = self._of(handle).name.encode()
        return 0


T4 = Gpu("GPU-11aa", "Tesla T4", (7, 5))
H200 = Gpu("GPU-22bb", "NVIDIA H200", (9, 0))
L4 = Gpu("GPU-22cc", "NVIDIA L4", (8, 9))
SLICED = Gpu("GPU-33dd", "NVIDIA H100", (9, 0), [Gpu("MIG-a1", "NVIDIA H100 MIG 3g.40gb", (9, 0)), Gpu("MIG-a2", "NVIDIA H100 MIG 1g.10gb", (9, 0))])


@pytest.fixture(autouse=True)
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def listing(library: FakeNvml, setting: str | None = None) -> list[tuple[int | None, str]]:
    found = _nvml.gpus(library, {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
    assert library.running == 0, "NVML was left open"
    return [(p.index, p.title) for p in found]


def test_what_is_reported() -> None:
    assert _nvml.gpus(FakeNvml(T4, H200), {}) == [Probed("cuda", "sm75", "Tesla T4", 0), Probed("cuda", "sm90", "NVIDIA H200", 1)]


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, ["Tesla T4", "NVIDIA H200", "NVIDIA L4"]),
        ("", []),
        ("1", ["NVIDIA H200"]),
        ("2,0", ["NVIDIA L4", "Tesla T4"]),
        ("2, 0", ["NVIDIA L4", "Tesla T4"]),
        ("0,7,1", ["Tesla T4"]),
        ("-1", []),
        ("1,-1,2", ["NVIDIA H200"]),
        ("1,1", []),
        ("no", []),
        ("1gpu", ["NVIDIA H200"]),
        ("GPU-11aa,GPU-22c", ["Tesla T4", "NVIDIA L4"]),
        ("GPU-22", []),  # fits two
        ("GPU-22b,GPU-99", ["NVIDIA H200"]),
    ],
)
def test_visible_devices(setting: str | None, chosen: list[str]) -> None:
    assert listing(FakeNvml(T4, H200, L4), setting) == list(enumerate(chosen))


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        (None, ["Tesla T4", "NVIDIA H100 MIG 3g.40gb"]),
        ("MIG-a2", ["NVIDIA H100 MIG 1g.10gb"]),
        ("MIG-a2,MIG-a1", ["NVIDIA H100 MIG 1g.10gb"]),  # a process gets one
        ("MIG-zz", []),
    ],
)
def test_mig(setting: str | None, chosen: list[str]) -> None:
    assert listing(FakeNvml(T4, SLICED), setting) == list(enumerate(chosen))


def test_a_gpu_that_may_not_be_opened_is_left_out() -> None:
    assert listing(FakeNvml(Gpu("GPU-1", "shut", (9, 0), open=False), T4)) == [(0, "Tesla T4")]


def test_without_a_driver_there_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert listing(FakeNvml(T4, init=9)) == []
    assert not caplog.records


def test_a_driver_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert listing(FakeNvml(T4, init=18)) == []
    assert "error 18" in caplog.text


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(_nvml.ctypes, "CDLL", missing)
    assert _nvml.probe() == []


def test_a_torch_without_cuda_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "without CUDA" in _nvml.gpus(FakeNvml(T4), {})[0].note


def test_visible_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the same variable for its own count; the two must not drift apart."""
    from torch import cuda

    monkeypatch.setattr(torch.version, "hip", None)
    for setting in ("", "0", "2,0", "1,-1", "1,1", "0gpu", "no", "0,9"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        theirs = [i for i in cuda._parse_visible_devices() if isinstance(i, int)]
        inside = next((n for n, i in enumerate(theirs) if i > 2), len(theirs))  # the count is applied later there
        assert visible(setting, ["GPU-1", "GPU-2", "GPU-3"]) == theirs[:inside], setting
