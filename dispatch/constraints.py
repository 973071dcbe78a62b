"""Constraints on one value: the check, the sentence and the table cell come from the same object.

A claim, a condition of an order and a condition in a config file are all built from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from attnmux.dispatch.errors import suggest
from attnmux.dispatch.spec import SPEC_FIELD_NAMES, show

if TYPE_CHECKING:
    from attnmux.dispatch.query import Query


@runtime_checkable
class Constraint(Protocol):
    """What a claim says of one field. Frozen and hashable.

    One whose limit depends on the case may also have ``wants_for(value, query)``: the sentence of a refusal, with its numbers.
    """

    def accepts(self, value: Any, query: Query) -> bool:
        """Whether the field's value is inside."""

    def wants(self) -> str:
        """What is accepted, to follow ``wanted``: ``64, 128 or 256``."""

    def cell(self) -> str:
        """The same, short, for the support matrix; empty when nothing is accepted."""


def either(values: tuple[str, ...]) -> str:
    """``a``, ``a or b``, ``a, b or c``."""
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + " or " + values[-1]


@dataclass(frozen=True, slots=True)
class Anything:
    """Every value."""

    def accepts(self, value: Any, query: Query) -> bool:
        return True

    def wants(self) -> str:
        return "anything"

    def cell(self) -> str:
        return "any"


@dataclass(frozen=True, slots=True)
class Off:
    """The feature must not be asked for: the default of every optional field of a claim."""

    def accepts(self, value: Any, query: Query) -> bool:
        return value is None or value is False

    def wants(self) -> str:
        return "no"

    def cell(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class On:
    """The feature must be asked for (conditions: ``mm_prefix = true``)."""

    def accepts(self, value: Any, query: Query) -> bool:
        return value is not None and value is not False

    def wants(self) -> str:
        return "yes"

    def cell(self) -> str:
        return "yes"


class OneOf:
    """One of the listed values. ``OneOf(None, "linear")`` accepts the feature in one form, or off."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        if not values:
            raise ValueError("OneOf needs at least one value")
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneOf) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"OneOf({', '.join(map(repr, self.values))})"

    def _key(self) -> tuple[Any, ...]:
        return tuple((type(v), v) for v in self.values)

    def accepts(self, value: Any, query: Query) -> bool:
        for v in self.values:  # noqa: SIM110  # a loop: this runs a hundred times in every selection
            if v == value and isinstance(v, bool) == isinstance(value, bool):
                return True
        return False

    def wants(self) -> str:
        return either(tuple(show(v) for v in self.values))

    def cell(self) -> str:
        shown = [show(v) for v in self.values if v is not None and v is not False]
        return " ".join(shown)


@dataclass(frozen=True, slots=True)
class Range:
    """A number in ``[lo, hi]`` and a multiple of ``of``; ``optional`` also accepts ``None``."""

    lo: int = 1
    hi: int | None = None
    of: int = 1
    optional: bool = False

    def accepts(self, value: Any, query: Query) -> bool:
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return bool(self.lo <= value and (self.hi is None or value <= self.hi) and value % self.of == 0)

    def wants(self) -> str:
        span = f"{self.lo} or more" if self.hi is None else f"{self.lo} to {self.hi}"
        span += f" in steps of {self.of}" if self.of > 1 else ""
        return span + (" or none" if self.optional else "")

    def cell(self) -> str:
        span = f"{self.lo}+" if self.hi is None else f"{self.lo}-{self.hi}"
        return span + (f" %{self.of}" if self.of > 1 else "") + (" or none" if self.optional else "")


@dataclass(frozen=True, slots=True)
class SameAs:
    """Equal to another field of the spec (a cache in the query's dtype, values as wide as keys)."""

    other: str

    def __post_init__(self) -> None:
        if self.other not in SPEC_FIELD_NAMES:
            raise ValueError(f"SameAs names the field {self.other!r}: {suggest(self.other, SPEC_FIELD_NAMES)}")

    def accepts(self, value: Any, query: Query) -> bool:
        return bool(value == query.value(self.other))

    def wants(self) -> str:
        return f"the same as {self.other}"

    def cell(self) -> str:
        return f"= {self.other}"


class AnyOf:
    """Accepted by at least one of several constraints."""

    __slots__ = ("parts",)

    def __init__(self, *parts: Constraint) -> None:
        if not parts:
            raise ValueError("AnyOf needs at least one constraint")
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyOf) and self.parts == other.parts

    def __hash__(self) -> int:
        return hash(self.parts)

    def __repr__(self) -> str:
        return f"AnyOf({', '.join(map(repr, self.parts))})"

    def accepts(self, value: Any, query: Query) -> bool:
        return any(part.accepts(value, query) for part in self.parts)

    def wants(self) -> str:
        return either(tuple(part.wants() for part in self.parts))

    def cell(self) -> str:
        return " ".join(filter(None, (part.cell() for part in self.parts)))


@dataclass(frozen=True, slots=True)
class Not:
    """Whatever another constraint refuses (conditions: head sizes that are no multiple of 32)."""

    part: Constraint

    def accepts(self, value: Any, query: Query) -> bool:
        return not self.part.accepts(value, query)

    def wants(self) -> str:
        return f"other than {self.part.wants()}"

    def cell(self) -> str:
        return f"not {self.part.cell()}"


ANY = Anything()
OFF = Off()
ON = On()
YES_OR_NO = OneOf(True, False)
