"""NVIDIA GPUs of this machine, through NVML by ctypes: no CUDA context, no Python package, safe before a fork."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.dispatch.platform import Probed
from attnmux.platforms._family import visible

_log = logging.getLogger("attnmux")

_DRIVER_NOT_LOADED = 9
_TEXT = 96
"""Bytes of the longest name or UUID NVML returns (``NVML_DEVICE_NAME_V2_BUFFER_SIZE``)."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """One GPU, or one MIG instance of a GPU that is cut into them."""

    uuid: str
    title: str
    arch: str

    @property
    def is_mig(self) -> bool:
        return self.uuid.startswith("MIG-")


def probe() -> list[Probed]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves this process, numbered as CUDA numbers them.

    NVML numbers by PCI bus, CUDA by speed unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``: on a machine with unlike GPUs only
    that setting makes indices certain. Without a driver, the answer is empty.
    """
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    return gpus(library, os.environ)


def gpus(library: Any, environ: Mapping[str, str]) -> list[Probed]:
    """The same from a loaded library and an environment. A driver that answers with an error is logged and has no GPUs."""
    status = library.nvmlInit_v2()
    if status == _DRIVER_NOT_LOADED:
        return []
    try:
        _check(status)
        units = list(_units(library))
    except OSError as error:
        _log.warning("NVIDIA GPUs are left out: %s", error)
        return []
    finally:
        if status == 0:
            library.nvmlShutdown()
    chosen = [units[i] for i in visible(environ.get("CUDA_VISIBLE_DEVICES"), [unit.uuid for unit in units])]
    first_mig = next((i for i, unit in enumerate(chosen) if unit.is_mig), len(chosen))
    note = "" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA and cannot drive it"
    # CUDA gives a process one MIG instance, the first it finds
    return [Probed("cuda", unit.arch, unit.title, index, note=note) for index, unit in enumerate(chosen[: first_mig + 1])]


def _units(library: Any) -> Iterator[_Unit]:
    count = ctypes.c_uint()
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)))
    for index in range(count.value):
        gpu = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu)) != 0:
            continue  # a GPU that this process may not open
        major, minor = ctypes.c_int(), ctypes.c_int()
        _check(library.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor)))
        arch = f"sm{major.value}{minor.value}"
        for unit in _instances(library, gpu) or [gpu]:
            yield _Unit(_text(library.nvmlDeviceGetUUID, unit), _text(library.nvmlDeviceGetName, unit), arch)


def _instances(library: Any, gpu: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    """The MIG instances of a GPU in MIG mode."""
    current, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if library.nvmlDeviceGetMigMode(gpu, ctypes.byref(current), ctypes.byref(pending)) != 0 or current.value != 1:
        return []
    _check(library.nvmlDeviceGetMaxMigDeviceCount(gpu, ctypes.byref(most)))
    found = []
    for index in range(most.value):
        instance = ctypes.c_void_p()
        if library.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, ctypes.byref(instance)) == 0:
            found.append(instance)
    return found


def _text(call: Any, handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _check(call(handle, buffer, _TEXT))
    return buffer.value.decode()


def _check(status: int) -> None:
    if status != 0:
        raise OSError(f"NVML answered with error {status}")
