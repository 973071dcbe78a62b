"""AMD GPUs of this machine, from the kernel driver's topology in sysfs: no HIP context, no Python package."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from attnmux.dispatch.platform import Probed
from attnmux.platforms._family import KIB, visible


def probe() -> list[Probed]:
    """The GPUs that ``ROCR_VISIBLE_DEVICES`` and then ``HIP_VISIBLE_DEVICES`` (else ``CUDA_VISIBLE_DEVICES``) leave this process."""
    return gpus(Path("/sys/class/kfd/kfd/topology/nodes"), os.environ)


def gpus(nodes: Path, environ: Mapping[str, str]) -> list[Probed]:
    """The same from any topology folder and environment."""
    found = [properties for folder in _numbered(nodes) if (properties := _gpu(folder)) is not None]
    found = [found[i] for i in visible(environ.get("ROCR_VISIBLE_DEVICES"), [_uuid(p) for p in found])]
    setting = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
    found = [found[i] for i in visible(setting, [_uuid(p) for p in found])]
    note = "" if torch.version.hip else f"torch {torch.__version__} is built without ROCm and cannot drive it"
    return [
        Probed("rocm", arch := _arch(p["gfx_target_version"]), f"AMD {arch}", index, p.get("lds_size_in_kb", 0) * KIB or None, note)
        for index, p in enumerate(found)
    ]


def _numbered(nodes: Path) -> Iterator[Path]:
    try:
        folders = [folder for folder in nodes.iterdir() if folder.name.isdigit()]
    except OSError:
        return iter(())
    return iter(sorted(folders, key=lambda folder: int(folder.name)))


def _gpu(folder: Path) -> dict[str, int] | None:
    """A node's properties, or ``None`` for a CPU and for a GPU that this process may not open."""
    try:
        lines = (folder / "properties").read_text().splitlines()
    except OSError:
        return None
    properties = {key: int(value) for key, _, value in (line.partition(" ") for line in lines) if value.strip().isdigit()}
    return properties if properties.get("simd_count") and properties.get("gfx_target_version") else None


def _arch(version: int) -> str:
    """90402 is gfx942, 90010 gfx90a: two decimal digits each for minor and stepping, written as hexadecimal digits."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _uuid(properties: dict[str, int]) -> str:
    return f"GPU-{properties.get('unique_id', 0):x}"
