"""What a machine is: :class:`Device`, and :class:`DeviceSet`, the patterns by which claims and orders name devices."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attnmux.dispatch.constraints import either
from attnmux.dispatch.errors import ConfigError

if TYPE_CHECKING:
    from attnmux.dispatch.query import Query

DEVICE_TYPES = ("cuda", "rocm", "xpu", "cpu")


@dataclass(frozen=True, slots=True)
class Device:
    """A snapshot of one device, real or by name only. Hashable, holds no handle.

    Args:
        type: ``cuda``, ``rocm``, ``xpu`` or ``cpu``.
        arch: ``sm90``, ``gfx942``, ``xe2``, ``x86_64`` ...
        title: for people: ``Hopper (H100, H200)`` or the product's name.
        platform: the platform plugin that recognised it.
        real: this machine has it; otherwise every answer is a dry run.
        index: ordinal among the visible devices of its type, or ``None``.
        shared_memory: bytes of shared memory (LDS, SLM) one block may use; 0 on a CPU.
        features: what the hardware has: ``bf16``, ``fp8_e4m3fn``, ``tma`` ...
        notes: what the table had to assume, for instance a nearest rule.
    """

    type: str
    arch: str
    title: str
    platform: str
    real: bool = False
    index: int | None = None
    shared_memory: int = 0
    features: frozenset[str] = frozenset()
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The name that ``select(device=...)`` takes: ``cuda:sm90``, ``xpu``, ``cpu``."""
        return self.type if self.type in ("cpu", "xpu") else f"{self.type}:{self.arch}"

    @property
    def torch_device(self) -> str:
        """The string torch takes for it (ROCm devices are ``cuda`` there)."""
        if self.type == "cpu":
            return "cpu"
        return f"{'cuda' if self.type == 'rocm' else self.type}:{self.index or 0}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "type": self.type,
            "arch": self.arch,
            "title": self.title,
            "platform": self.platform,
            "real": self.real,
            "index": self.index,
            "shared_memory": self.shared_memory,
            "features": sorted(self.features),
            "notes": list(self.notes),
        }


@lru_cache(maxsize=256)
def sm_version(arch: str) -> int | None:
    """``sm90`` and ``sm90a`` as 90; ``None`` for an arch that is not NVIDIA's."""
    found = re.fullmatch(r"sm_?(\d+)[af]?", arch)
    return int(found.group(1)) if found else None


_SPELLING = {"cuda": r"sm\d{2,3}", "rocm": r"gfx[0-9a-f]{3,5}", "xpu": r"xe\w*", "cpu": r"\w+"}


def spelled_arch(kind: str, arch: str) -> str | None:
    """An arch the way devices carry it (``sm_90a`` is ``sm90``), or ``None`` when it is no arch of that type."""
    if kind == "cuda" and (version := sm_version(arch)) is not None:
        arch = f"sm{version}"
    return arch if re.fullmatch(_SPELLING[kind], arch, re.ASCII) else None


_PATTERN = re.compile(r"(?P<type>cuda|rocm|xpu|cpu)(?::(?P<lo>[a-z0-9_]+?)(?:(?P<open>\+)|\.\.(?P<hi>[a-z0-9_]+)|(?P<glob>\*))?)?")


class DeviceSet:
    """Devices by pattern: ``cuda``, ``cuda:sm90``, ``cuda:sm80..sm89``, ``cuda:sm80+``, ``rocm:gfx9*``, ``cpu``.

    It is a constraint like any other: the field's value is the :class:`Device`.

    Raises:
        ConfigError: a pattern is malformed.
    """

    __slots__ = ("_parsed", "patterns")

    def __init__(self, *patterns: str) -> None:
        if not patterns:
            raise ConfigError("DeviceSet needs at least one pattern")
        self.patterns = patterns
        self._parsed = tuple(_parse(p) for p in patterns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceSet) and self.patterns == other.patterns

    def __hash__(self) -> int:
        return hash(self.patterns)

    def __repr__(self) -> str:
        return f"DeviceSet({', '.join(map(repr, self.patterns))})"

    def __contains__(self, device: Device) -> bool:
        return any(_matches(p, device) for p in self._parsed)

    def accepts(self, value: Device, query: Query) -> bool:
        return value in self

    def wants(self) -> str:
        return either(self.patterns)

    def cell(self) -> str:
        return " ".join(self.patterns)


@lru_cache(maxsize=256)
def union(patterns: tuple[str, ...]) -> DeviceSet:
    """The set of all these patterns, each once; an arch that another pattern holds is not named again."""
    kept = []
    for pattern in dict.fromkeys(patterns):
        parsed = _parse(pattern)
        alone = parsed["lo"] is not None and not (parsed["open"] or parsed["hi"] or parsed["glob"])
        device = Device(str(parsed["type"]), str(parsed["lo"]), "", "")
        if not (alone and any(other != pattern and device in DeviceSet(other) for other in patterns)):
            kept.append(pattern)
    return DeviceSet(*kept)


def _parse(pattern: str) -> dict[str, str | None]:
    found = _PATTERN.fullmatch(pattern)
    if not found:
        raise ConfigError(f"device pattern {pattern!r} is not understood: write cuda, cuda:sm90, cuda:sm80..sm89, cuda:sm80+, rocm:gfx9*, xpu or cpu")
    parsed = found.groupdict()
    kind, lo, hi = parsed["type"], parsed["lo"], parsed["hi"]
    if parsed["open"] or hi:
        least, most = sm_version(lo), sm_version(hi or lo)
        if least is None or most is None:
            raise ConfigError(f"device pattern {pattern!r}: ranges need sm numbers on both ends, as in cuda:sm80..sm89")
        if least > most:
            raise ConfigError(f"device pattern {pattern!r}: the first number is above the second, so it matches nothing")
    elif lo and not parsed["glob"]:
        parsed["lo"] = spelled_arch(kind, lo)
        if parsed["lo"] is None:
            raise ConfigError(f"device pattern {pattern!r}: {lo!r} is no arch of {kind}; write cuda:sm90, rocm:gfx942, xpu:xe2 or cpu:x86_64")
    return parsed


def _matches(pattern: dict[str, str | None], device: Device) -> bool:
    lo = pattern["lo"]
    if pattern["type"] != device.type:
        return False
    if lo is None:
        return True
    if pattern["glob"]:
        return device.arch.startswith(lo)
    if not (pattern["open"] or pattern["hi"]):
        return lo == device.arch
    version, least = sm_version(device.arch), sm_version(lo)
    if version is None or least is None or version < least:
        return False
    return pattern["hi"] is None or version <= (sm_version(pattern["hi"]) or 0)
