"""Users' wishes as data: one :class:`Steering` for each source, and how several combine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from attnmux.dispatch.errors import ConfigError, suggest
from attnmux.dispatch.platform import Order
from attnmux.dispatch.spec import ROW_CLASSES, RowClass

if TYPE_CHECKING:
    from attnmux.dispatch.catalog import Catalog

Names = str | Sequence[str] | Mapping[RowClass, str | Sequence[str]] | Mapping[str, str | Sequence[str]]
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
    if order is not None and not isinstance(order, str | list | tuple):
        raise ConfigError(f"order ({source}) is {order!r}, wanted a list of backend names or attnmux.plugin.Order")
    order = split_order(order) if isinstance(order, str) else list(order or ())
    names = tuple(o for o in order if isinstance(o, str))
    orders = tuple(o for o in order if isinstance(o, Order))
    if len(names) + len(orders) != len(order):
        wrong = next(o for o in order if not isinstance(o, str | Order))
        raise ConfigError(f"order ({source}) holds {wrong!r}, wanted backend names or attnmux.plugin.Order")
    for backend, section in (options or {}).items():
        if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
            raise ConfigError(f"{source}: options of {backend} are {section!r}, wanted {{name: value}}")
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


def split_order(text: str) -> list[str | Order]:
    """``a>b`` or ``a,b`` as names."""
    return [name.strip() for name in text.replace(">", ",").split(",")]


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
    outranked: tuple[Pick, ...] = ()
    """What lower sources require: without effect while ``require`` is set."""

    def required(self, row_class: RowClass) -> tuple[Pick, ...]:
        return tuple(pick for pick in self.require if pick.applies(row_class))

    def requiring(self, row_class: RowClass) -> str:
        """The sources whose require stands in the way of other backends, once the highest is dropped too."""
        picks = (*self.required(row_class), *(pick for pick in self.outranked if pick.applies(row_class)))
        return ", ".join(dict.fromkeys(pick.source for pick in picks))

    def denying(self, name: str, row_class: RowClass) -> str:
        """The sources that deny a backend, or nothing."""
        return ", ".join(dict.fromkeys(pick.source for pick in self.deny if pick.name == name and pick.applies(row_class)))


def combine(sources: Sequence[Steering], catalog: Catalog) -> Steered:
    """Combine sources, highest first: require by the highest that sets it, prefer concatenated, deny united, orders in turn.

    Raises:
        ConfigError: an unknown name, a composition in deny, or a backend that is both required and denied.
    """
    for steering in sources:
        _check_names(steering, catalog)
    require, *lower = [s.require for s in sources if s.require] or [()]
    deny = tuple(pick for s in sources for pick in s.deny)
    for row_class in ROW_CLASSES:
        for wanted, refused in product(require, deny):
            part = catalog.part(wanted.name, row_class) if wanted.applies(row_class) else None
            if part == refused.name and refused.applies(row_class):
                what = repr(part) if part == wanted.name else f"{part!r}, a part of {wanted.name!r},"
                raise ConfigError(f"{what} is required by {wanted.source} and denied by {refused.source}: drop one of them")
    return Steered(
        prefer=tuple(pick for s in sources for pick in s.prefer),
        require=require,
        deny=deny,
        orders=tuple(order for s in sources for order in s.orders),
        outranked=tuple(pick for picks in lower for pick in picks),
    )


def _check_names(steering: Steering, catalog: Catalog) -> None:
    named = [(verb, pick.name) for verb in ("prefer", "require") for pick in getattr(steering, verb)]
    named += [("order", name) for order in steering.orders for name in order.names]
    for verb, name in named:
        if name not in catalog.backends and name not in catalog.compositions:
            raise ConfigError(f"{verb} ({steering.source}): unknown backend {name!r}: {suggest(name, catalog.names())}")
    # a composition is only a name for backends: denying it would leave open which of them may run
    only_backends = [("deny", pick.name) for pick in steering.deny] + [("options", backend) for backend, _, _ in steering.options]
    for verb, name in only_backends:
        if name in catalog.compositions:
            parts = ", ".join(dict.fromkeys(backend for _, backend in catalog.compositions[name].pairs))
            raise ConfigError(f"{verb} ({steering.source}): {name!r} is a composition, wanted a backend; its parts are {parts}")
        if name not in catalog.backends:
            raise ConfigError(f"{verb} ({steering.source}): unknown backend {name!r}: {suggest(name, sorted(catalog.backends))}")
