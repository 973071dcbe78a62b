"""What a platform plugin declares: the devices it recognises and the orders in which it would try backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnmux.dispatch.constraints import Constraint, either
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.errors import ConfigError, complaint, suggest
from attnmux.dispatch.query import QUERY_FIELDS, Query
from attnmux.dispatch.spec import ROW_CLASSES, RowClass

Band = tuple[int, int | None]
"""An inclusive range of lengths; ``None`` is open."""


@dataclass(frozen=True, slots=True)
class When:
    """A condition: device, row classes, and constraints on spec fields; what is left out does not matter."""

    device: DeviceSet | None = None
    row_class: tuple[RowClass, ...] = ()
    fields: tuple[tuple[str, Constraint], ...] = ()

    def matches(self, query: Query) -> bool:
        if self.device is not None and query.device not in self.device:
            return False
        if self.row_class and query.row_class not in self.row_class:
            return False
        return all(constraint.accepts(query.value(name), query) for name, constraint in self.fields)

    def __str__(self) -> str:
        parts = [f"device {self.device.wants()}"] if self.device else []
        parts += [either(self.row_class) + " rows"] if self.row_class else []
        parts += [f"{name} {constraint.wants()}" for name, constraint in self.fields]
        return ", ".join(parts) or "always"


ALWAYS = When()


def when(device: str | DeviceSet | None = None, row_class: str | tuple[str, ...] = (), **fields: Constraint) -> When:
    """A condition in one call: ``when(row_class="decode", head_size=OneOf(256, 512))``.

    Raises:
        ConfigError: a field or a row class does not exist.
    """
    for name in fields:
        if name not in QUERY_FIELDS[2:]:
            raise ConfigError(f"unknown field {name!r} in a condition: {suggest(name, QUERY_FIELDS[2:])}")
    if device is not None and not isinstance(device, str | DeviceSet):
        raise ConfigError(f"device of a condition is {device!r}, wanted a pattern such as 'cuda:sm90'")
    classes: Any = (row_class,) if isinstance(row_class, str) else tuple(row_class)
    for name in classes:
        if name not in ROW_CLASSES:
            raise ConfigError(f"unknown row class {name!r}: {suggest(name, ROW_CLASSES)}")
    return When(DeviceSet(device) if isinstance(device, str) else device, classes, tuple(sorted(fields.items())))


@dataclass(frozen=True, slots=True)
class Order:
    """Backends or compositions, best first, for queries that match ``when``.

    Args:
        names: what to try, in this order.
        reason: why, in one sentence; ``explain`` prints it.
        when: the condition; the first order of a source that matches decides.
        q_len, kv_len: bands: rows with so many query tokens or keys only; the other rows go by the next order that matches.
        source: who says so (``platform cuda_sm90``, ``file ~/attnmux.toml``); filled in by whoever loads it.
    """

    names: tuple[str, ...]
    reason: str
    when: When = ALWAYS
    q_len: Band | None = None
    kv_len: Band | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.names, tuple) or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError(f"names of an order are {self.names!r}, wanted a tuple of backend names")
        for field_name, band in (("q_len", self.q_len), ("kv_len", self.kv_len)):
            if band is not None and not _is_band(band):
                raise ConfigError(f"{field_name} of an order is {band!r}, wanted (lowest, highest) or (lowest, None)")

    @property
    def banded(self) -> bool:
        return self.q_len is not None or self.kv_len is not None


def _is_band(band: object) -> bool:
    """Two whole numbers, the first at least 0 and not above the second, which may be open."""
    if not isinstance(band, tuple) or len(band) != 2 or any(isinstance(n, bool) or not isinstance(n, int) for n in band if n is not None):
        return False
    lo, hi = band
    return lo is not None and lo >= 0 and (hi is None or lo <= hi)


@dataclass(frozen=True, slots=True)
class Insertion:
    """A plugin's wish to stand in the platforms' orders: ``name`` goes just before another entry, or first, or last.

    Args:
        name: the backend or composition to insert.
        reason: why it belongs there; ``explain`` prints it.
        before: the entry to stand before; an order without that entry is left alone. ``"*"`` stands for the first
            place and ``None`` for the last.
        when: where it applies.
    """

    name: str
    reason: str
    before: str | None = None
    when: When = ALWAYS
    source: str = ""


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture of a platform, from its data sheet.

    Args:
        title: for people.
        shared_memory: bytes one block may use.
        features: ``bf16``, ``fp8_e4m3fn``, ``tma``, ``wgmma`` ...
        aliases: other names for ``select(device=...)``: ``mi300``.
    """

    title: str
    shared_memory: int = 0
    features: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Probed:
    """A device found on this machine by a platform's ``probe``.

    Args:
        type, arch, title: as in :class:`~attnmux.dispatch.device.Device`.
        index: ordinal among the visible devices of its type.
        shared_memory: bytes one block may use, where the system tells.
        note: why this build of torch cannot drive it; such a device is listed, and every answer for it is a dry run.
    """

    type: str
    arch: str
    title: str
    index: int | None = None
    shared_memory: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A family of devices.

    Args:
        name: unique: ``cuda_sm90``.
        devices: what it recognises. When several platforms do, one that lists the arch in ``archs`` wins, then the
            one with fewer archs in its pattern (``generic`` is the last resort).
        archs: the architectures known from data sheets; others take the nearest one's limits, with a note.
        orders: in which order to try backends; the first that matches decides.
        probe: ``"module:function"`` that lists this machine's devices as :class:`Probed` without creating a context.
            Platforms of a family share it; it is called once.
        generic: recognises what no other platform does.
    """

    name: str
    devices: DeviceSet
    archs: dict[str, Arch] = field(default_factory=dict)
    orders: tuple[Order, ...]
    probe: str = ""
    generic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.devices, DeviceSet):
            raise TypeError(complaint(f"devices of platform {self.name!r}", repr(self.devices), "a DeviceSet"))
        if not isinstance(self.orders, tuple) or not all(isinstance(order, Order) for order in self.orders):
            raise TypeError(complaint(f"orders of platform {self.name!r}", repr(self.orders), "a tuple of Orders"))
        if not all(isinstance(arch, Arch) for arch in self.archs.values()):
            raise TypeError(complaint(f"archs of platform {self.name!r}", repr(self.archs), "{name: Arch}"))
