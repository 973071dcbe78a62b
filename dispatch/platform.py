"""What a platform plugin declares: the devices it recognises and the orders in which it would try backends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attnmux.dispatch.constraints import Constraint, either
from attnmux.dispatch.device import DeviceSet
from attnmux.dispatch.errors import ConfigError, suggest
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

    @property
    def banded(self) -> bool:
        return self.q_len is not None or self.kv_len is not None


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
    """A device found on this machine by a platform's ``probe``."""

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
