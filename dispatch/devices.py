"""From a device's name, or from this machine, to a :class:`Device`. Platforms decide; nothing here knows an architecture."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

import torch

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.device import DEVICE_TYPES, Device, sm_version, spelled_arch
from attnmux.dispatch.errors import UnknownDeviceError, suggest
from attnmux.dispatch.platform import Arch, Platform, Probed

_log = logging.getLogger("attnmux")


def probe_machine(catalog: Catalog) -> tuple[Device, ...]:
    """The devices of this machine, accelerators first. Creates no context. A probe that fails is logged and finds nothing."""
    probes = dict.fromkeys(p.probe for p in catalog.platforms.values() if p.probe)
    found: list[Device] = []
    for probe in probes:
        module, _, function = probe.partition(":")
        try:
            found.extend([_device(catalog, p.type, p.arch, p) for p in getattr(importlib.import_module(module), function)()])
        except Exception as error:  # a plugin's probe must not take the host down
            _log.warning("the device probe %s failed, what it would have found is left out: %s: %s", probe, type(error).__name__, error)
    return tuple(sorted(found, key=lambda d: (DEVICE_TYPES.index(d.type), d.index or 0)))


def known_names(catalog: Catalog) -> list[str]:
    """The device names that the platforms' tables list."""
    names = [f"{kind}:{arch}" for p in catalog.platforms.values() for arch in p.archs for kind in [_type_of(p)] if kind in ("cuda", "rocm")]
    return [*names, *(kind for kind in ("xpu", "cpu") if any(_type_of(p) == kind for p in catalog.platforms.values()))]


def resolve(device: str | torch.device | Device | None, catalog: Catalog, machine: Sequence[Device]) -> Device:
    """The device meant by an argument.

    Args:
        device: ``None`` (the first accelerator here that torch can drive, else the CPU), ``"cuda:0"``, ``"cuda:sm100"``, ``"rocm:mi300"``,
            ``"xpu"``, ``"cpu"``, a ``torch.device`` or a :class:`Device`.

    Raises:
        TypeError: it is none of these.
        UnknownDeviceError: the name is malformed, no platform recognises it, or an index is not in this machine.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        usable = next((d for d in machine if d.real), None)
        return usable or _device(catalog, "cpu", _default_arch(catalog, "cpu"), None)
    if isinstance(device, torch.device):
        kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
        device = kind if device.index is None or kind == "cpu" else f"{kind}:{device.index}"
    if not isinstance(device, str):
        raise TypeError(f"device is {device!r} ({type(device).__name__}), wanted a name, a torch.device or None")
    return _resolve_name(device.strip().lower(), catalog, machine)


def _resolve_name(name: str, catalog: Catalog, machine: Sequence[Device]) -> Device:
    aliases = {alias: (_type_of(p), arch) for p in catalog.platforms.values() for arch, a in p.archs.items() for alias in a.aliases}
    kind, _, arch = name.partition(":")
    if (alias := aliases.get(arch or kind)) and kind in (alias[0], arch or kind):
        kind, arch = alias
    if kind not in DEVICE_TYPES:
        raise UnknownDeviceError(f"unknown device {name!r}: {suggest(name, known_names(catalog))}")
    here = [d for d in machine if d.type == kind]
    if kind == "cpu" and arch == "0":
        arch = ""  # torch's name for it
    if arch == "" and here:
        return here[0]
    if arch.isdecimal() and kind != "cpu":
        for d in here:
            if d.index == int(arch):
                return d
        raise UnknownDeviceError(f"device {name!r} is not in this machine, which has {len(here)} {kind} devices; name an architecture for a dry run")
    if arch == "":
        if kind not in ("cpu", "xpu"):
            known = ", ".join(n for n in known_names(catalog) if n.startswith(kind))
            raise UnknownDeviceError(f"this machine has no {kind} device; name an architecture for a dry run: {known}")
        arch = _default_arch(catalog, kind)
    spelled = spelled_arch(kind, arch)
    for d in here:
        if d.arch == spelled:
            return d
    listed = any(spelled in p.archs for p in catalog.platforms.values() if _type_of(p) == kind)
    if spelled is None or (kind == "cpu" and not listed):  # accelerators not listed go by the nearest rule
        raise UnknownDeviceError(f"unknown device {name!r}: {suggest(name, known_names(catalog))}")
    return _device(catalog, kind, spelled, None)


def _device(catalog: Catalog, kind: str, arch: str, probed: Probed | None) -> Device:
    platform = _platform_of(catalog, kind, arch)
    limits, notes = _limits_of(catalog, platform, kind, arch)
    if probed is not None and probed.note:
        notes = (*notes, probed.note)
    return Device(
        type=kind,
        arch=arch,
        title=probed.title if probed else limits.title,
        platform=platform.name,
        real=probed is not None and not probed.note,
        index=probed.index if probed else None,
        shared_memory=(probed.shared_memory if probed else None) or limits.shared_memory,
        features=limits.features,
        notes=notes,
    )


def _platform_of(catalog: Catalog, kind: str, arch: str) -> Platform:
    """The platform that lists the arch, else one whose pattern recognises it, else a generic one."""
    bare = Device(kind, arch, "", "")
    fitting = [p for p in catalog.platforms.values() if bare in p.devices]
    if not fitting:
        raise UnknownDeviceError(f"no platform recognises {kind}:{arch}: {suggest(f'{kind}:{arch}', known_names(catalog))}")
    return min(fitting, key=lambda p: (arch not in p.archs, p.generic, p.name))


def _limits_of(catalog: Catalog, platform: Platform, kind: str, arch: str) -> tuple[Arch, tuple[str, ...]]:
    if arch in platform.archs:
        return platform.archs[arch], ()
    tables = {a: limits for p in catalog.platforms.values() if _type_of(p) == kind for a, limits in p.archs.items()}
    own = platform.archs or tables
    if not own:
        return Arch(arch), (f"{arch} is in no table: no limits are known",)
    version = sm_version(arch)
    if version is not None:  # the nearest below, else the lowest known
        below = [a for a in tables if (v := sm_version(a)) is not None and v <= version]
        nearest = max(below, key=lambda a: sm_version(a) or 0) if below else min(own, key=lambda a: sm_version(a) or 0)
        own = tables
    else:
        nearest = next(iter(own))
    return own[nearest], (f"{arch} is in no table: taken with the limits of {nearest}, rules of {platform.name}",)


def _type_of(platform: Platform) -> str:
    return platform.devices.patterns[0].partition(":")[0]


def _default_arch(catalog: Catalog, kind: str) -> str:
    for platform in catalog.platforms.values():
        if _type_of(platform) == kind and platform.archs:
            return next(iter(platform.archs))
    raise UnknownDeviceError(f"no platform recognises {kind}: {suggest(kind, known_names(catalog))}")
