"""Users' wishes as data: one :class:`Steering` for each source, and how several combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.dispatch.platform import Order
from attnmux.dispatch.spec import ROW_CLASSES, RowClass

Names = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""What prefer, require and deny take: a name, several, or ``{row class: name or names}``."""


@dataclass(frozen=True, slots=True)
class Pick:
    """A backend or composition named by a user, for one row class or for all."""

    name: str
    row_class: RowClass | None
    source: str

    def applies(self, row_class: RowClass) -> bool:
        return self.row_class is None or self.row_class == row_class


@dataclass(frozen=True, slots=True)
class Steering:
    """What one source (an argument, a context, the environment, a file) says.

    Args:
        source: for people: ``argument``, ``environment``, ``file ~/attnmux.toml``.
        prefer: tried first; passed over with a note when they cannot run.
        require: nothing else will do.
        deny: never.
        orders: replace the platform's order where their conditions match; entries left out keep their places behind.
        options: ``(backend, key, value)`` for backends' own settings.
    """

    source: str
    prefer: tuple[Pick, ...] = ()
    require: tuple[Pick, ...] = ()
    deny: tuple[Pick, ...] = ()
    orders: tuple[Order, ...] = ()
    options: tuple[tuple[str, str, Any], ...] = ()


def steer(
    source: str,
    *,
    prefer: Names | None = None,
    require: Names | None = None,
    deny: Names | None = None,
    order: Sequence[str | Order] | str | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Steering:
    """Read one source's verbs.

    Raises:
        ConfigError: a row class does not exist, or a value has the wrong type.
    """
    if isinstance(order, str):
        order = [name.strip() for name in order.replace(">", ",").split(",")]
    order = list(order or ())
    names = tuple(o for o in order if isinstance(o, str))
    orders = tuple(o for o in order if isinstance(o, Order))
    if len(names) + len(orders) != len(order):
        wrong = next(o for o in order if not isinstance(o, str | Order))
        raise ConfigError(f"order ({source}) holds {wrong!r}, wanted backend names or attnmux.plugin.Order")
    signed = tuple(Order(o.names, o.reason, o.when, o.q_len, o.kv_len, source) for o in orders)
    if names:
        signed += (Order(names, "order given by the user", source=source),)
    return Steering(
        source,
        _picks(source, "prefer", prefer),
        _picks(source, "require", require),
        _picks(source, "deny", deny),
        signed,
        tuple((backend, key, _plain(source, backend, key, value)) for backend, section in (options or {}).items() for key, value in section.items()),
    )


def _plain(source: str, backend: str, key: str, value: object) -> object:
    """An option's value, hashable: selections are memoised by what steers them."""
    if isinstance(value, list):
        return tuple(_plain(source, backend, key, item) for item in value)
    if not isinstance(value, str | int | float | bool):
        raise ConfigError(f"{source}: option {backend}.{key} is {value!r}, wanted a string, a number, true, false or a list of these")
    return value


def _picks(source: str, verb: str, value: Names | None) -> tuple[Pick, ...]:
    if value is None:
        return ()
    if isinstance(value, Mapping):
        for row_class in value:
            if row_class not in ROW_CLASSES:
                raise ConfigError(f"{verb} ({source}): unknown row class {row_class!r}: {suggest(str(row_class), ROW_CLASSES)}")
        return tuple(Pick(name, row_class, source) for row_class, names in value.items() for name in _names(source, verb, names))  # type: ignore[arg-type]
    return tuple(Pick(name, None, source) for name in _names(source, verb, value))


def _names(source: str, verb: str, value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
        raise ConfigError(f"{verb} ({source}) is {value!r}, wanted a backend name, a list of names or {{row class: name}}")
    return tuple(names)


@dataclass(frozen=True, slots=True)
class Steered:
    """All sources combined, highest first: what the selector reads."""

    prefer: tuple[Pick, ...] = ()
    require: tuple[Pick, ...] = ()
    deny: tuple[Pick, ...] = ()
    orders: tuple[Order, ...] = ()

    def required(self, row_class: RowClass) -> tuple[Pick, ...]:
        return tuple(pick for pick in self.require if pick.applies(row_class))

    def denied(self, name: str, row_class: RowClass) -> Pick | None:
        return next((pick for pick in self.deny if pick.name == name and pick.applies(row_class)), None)


def combine(sources: Sequence[Steering], known: Sequence[str]) -> Steered:
    """Combine sources, highest first: require by the highest that sets it, prefer concatenated, deny united, orders in turn.

    Raises:
        ConfigError: an unknown name, or a backend that is both required and denied.
    """
    for steering in sources:
        named = [(verb, pick.name) for verb in ("prefer", "require", "deny") for pick in getattr(steering, verb)]
        named += [("order", name) for order in steering.orders for name in order.names]
        for verb, name in named:
            if name not in known:
                raise ConfigError(f"{verb} ({steering.source}): unknown backend {name!r}: {suggest(name, list(known))}")
    require = next((s.require for s in sources if s.require), ())
    deny = tuple(pick for s in sources for pick in s.deny)
    for wanted in require:
        for refused in deny:
            if wanted.name == refused.name and (None in (wanted.row_class, refused.row_class) or wanted.row_class == refused.row_class):
                raise ConfigError(f"{wanted.name!r} is required by {wanted.source} and denied by {refused.source}: drop one of them")
    return Steered(
        prefer=tuple(pick for s in sources for pick in s.prefer),
        require=require,
        deny=deny,
        orders=tuple(order for s in sources for order in s.orders),
    )
