"""What a backend can do: :class:`Claim`, a combination of constraints, and :class:`BackendInfo`, a backend's declaration."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from attnmux.dispatch.constraints import ANY, OFF, Constraint, OneOf, SameAs
from attnmux.dispatch.device import DeviceSet, union
from attnmux.dispatch.errors import complaint, suggest
from attnmux.dispatch.query import Query
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.requirements import Requirement, Toolchain
from attnmux.dispatch.spec import ROW_CLASSES, RowClass, show

if TYPE_CHECKING:
    from attnmux.dispatch.backend import Backend

ROW_CLASS_ANY = OneOf("image", "prefill", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A combination that the backend runs exactly as the semantics say. What is not mentioned is not claimed.

    Each attribute but the last constrains the field of that name; the defaults refuse every optional feature.
    ``requires`` holds what this combination needs beyond the backend's own requirements.
    """

    device: DeviceSet
    row_class: Constraint = ROW_CLASS_ANY
    lengths: Constraint = OneOf("exact")
    group: Constraint = ANY
    num_q_heads: Constraint = ANY
    num_kv_heads: Constraint = ANY
    head_size: Constraint
    dtype: Constraint
    v_head_size: Constraint = SameAs("head_size")
    scale: Constraint = ANY
    q_dtype: Constraint = SameAs("dtype")
    kv_dtype: Constraint = SameAs("dtype")
    kv_scale: Constraint = OFF
    page_size: Constraint
    kv_layout: Constraint = OneOf("NHD")
    attn_type: Constraint = OneOf("decoder")
    causal: Constraint = OneOf(True)
    sliding_window: Constraint = OFF
    window_right: Constraint = OFF
    chunk: Constraint = OFF
    softcap: Constraint = OFF
    alibi: Constraint = OFF
    sinks: Constraint = OFF
    mm_prefix: Constraint = OFF
    rswa_window: Constraint = OFF
    sparse: Constraint = OFF
    return_lse: Constraint = OFF
    batch_invariant: Constraint = OFF
    requires: tuple[Requirement, ...] = ()

    def __post_init__(self) -> None:
        for field in CLAIM_FIELDS:  # a bare value here would otherwise fail in the middle of somebody's select()
            if not hasattr(getattr(self, field), "accepts"):
                raise TypeError(
                    complaint(f"{field} of a claim", repr(getattr(self, field)), f"a constraint, such as OneOf({getattr(self, field)!r})")
                )
        _check_requirements("requires of a claim", self.requires)

    def constraint(self, field: str) -> Constraint:
        """The constraint on one field."""
        found: Constraint = getattr(self, field)
        return found

    def refusals(self, query: Query) -> tuple[Reason, ...]:
        """Every field of the query that this claim does not cover."""
        return tuple(_reason(field, query.value(field), constraint, query) for field, constraint in self._refusing(query))

    def covers(self, query: Query) -> bool:
        """Whether it refuses nothing."""
        return next(self._refusing(query), None) is None

    def _refusing(self, query: Query) -> Iterator[tuple[str, Constraint]]:
        for field in CLAIM_FIELDS:
            constraint = getattr(self, field)
            if constraint is ANY or constraint.accepts(query.value(field), query):
                continue
            # no token of a prefill or decode row lies in a span, so the kind of spans means nothing there
            if field != "mm_prefix" or query.row_class == "image":
                yield field, constraint


CLAIM_FIELDS: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Claim) if f.name != "requires")


def check_name(what: str, name: object) -> None:
    """Names stand in environment variables and on command lines.

    Raises:
        ValueError: it is not lower-case letters, digits and underscores.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(complaint(f"the name of a {what}", repr(name), "lower-case letters, digits and underscores, a letter first"))


def _check_requirements(what: str, requires: object) -> None:
    if not isinstance(requires, tuple) or not all(isinstance(r, Requirement) for r in requires):
        raise TypeError(complaint(what, repr(requires), "a tuple of requirements, such as (Package('acme'),)"))


def _reason(field: str, value: object, constraint: Constraint, query: Query) -> Reason:
    in_numbers = getattr(constraint, "wants_for", None)
    if in_numbers is not None:
        return Reason("unsupported", field, show(value), in_numbers(value, query))
    if field == "device":
        return Reason("device", field, str(getattr(value, "name", value)), constraint.wants())
    code = "row-class" if field == "row_class" else "unsupported"
    return Reason(code, field, show(value), constraint.wants())


@dataclass(frozen=True, slots=True)
class TestedOn:
    """A recorded run of a backend's conformance checks on hardware."""

    device: str
    hardware: str
    date: str
    versions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A backend as its plugin declares it. Importing the declaring module must import no kernel library.

    Args:
        name: lower case, unique; what prefer, require and orders use.
        summary: one line for ``attnmux backends``.
        claims: what it can do; a query is accepted when one claim refuses nothing.
        implementation: ``"package.module:Class"`` of a :class:`~attnmux.dispatch.backend.Backend`, or the class
            itself; ``None`` while the code is not in (a note in a dry run, a reason on a real machine).
        requires: what every claim needs.
        graphs: row classes whose launches a CUDA graph may capture.
        tested_on: recorded runs; where a device has none the support matrix says "declared, not run".
    """

    name: str
    summary: str
    claims: tuple[Claim, ...]
    implementation: str | type[Backend] | None
    requires: tuple[Requirement, ...] = ()
    graphs: tuple[RowClass, ...] = ()
    tested_on: tuple[TestedOn, ...] = ()

    def __post_init__(self) -> None:
        check_name("backend", self.name)
        if not isinstance(self.claims, tuple) or not self.claims or not all(isinstance(claim, Claim) for claim in self.claims):
            raise TypeError(complaint(f"claims of backend {self.name!r}", repr(self.claims), "a tuple of one or more Claims"))
        if isinstance(self.implementation, str) and not re.fullmatch(r"[\w.]+:\w+", self.implementation):
            raise ValueError(complaint(f"implementation of backend {self.name!r}", repr(self.implementation), "'package.module:Class'"))
        _check_requirements(f"requires of backend {self.name!r}", self.requires)
        for row_class in self.graphs:
            if row_class not in ROW_CLASSES:
                raise ValueError(f"graphs of backend {self.name!r} holds {row_class!r}: {suggest(str(row_class), ROW_CLASSES)}")

    def devices(self) -> DeviceSet:
        """Where it claims anything."""
        return union(tuple(pattern for claim in self.claims for pattern in claim.device.patterns))

    def requirements(self) -> tuple[Requirement, ...]:
        """All requirements, of the backend and of its claims."""
        return tuple(dict.fromkeys((*self.requires, *(r for claim in self.claims for r in claim.requires))))

    def judge(self, query: Query, toolchain: Toolchain | None) -> tuple[Claim | None, tuple[Reason, ...]]:
        """The first claim that covers the query, or ``None`` and the reasons of the claim that came nearest.

        With a ``toolchain`` (a real machine) what a claim requires counts; without one it does not.
        """
        here = [claim for claim in self.claims if query.device in claim.device]
        if not here:
            return None, (_reason("device", query.device, self.devices(), query),)
        for claim in here:
            if claim.covers(query) and not (toolchain is not None and toolchain.unmet(claim.requires)):
                return claim, ()
        nearest: tuple[Reason, ...] | None = None
        for claim in here:
            refusals = claim.refusals(query)
            if toolchain is not None:
                refusals += toolchain.unmet(claim.requires)
            if nearest is None or _distance(refusals) < _distance(nearest):
                nearest = refusals
        return None, nearest or ()


def _distance(refusals: tuple[Reason, ...]) -> tuple[int, int]:
    return sum(reason.code == "row-class" for reason in refusals), len(refusals)


@dataclass(frozen=True, slots=True)
class Composition:
    """A registered name for a ``{row class: backend}`` map; in an order it stands for its parts.

    Args:
        name: lower case, unique among backends and compositions.
        parts: ``{"prefill": "acme", "decode": "triton"}``, or the same as a tuple of pairs.
        summary: one line.
    """

    name: str
    parts: tuple[tuple[RowClass, str], ...] | Mapping[RowClass, str]
    summary: str = ""

    def __post_init__(self) -> None:
        check_name("composition", self.name)
        if isinstance(self.parts, Mapping):
            object.__setattr__(self, "parts", tuple(self.parts.items()))
        classes = [row_class for row_class, _ in self.pairs]
        if not classes or len(set(classes)) != len(classes) or not set(classes) <= set(ROW_CLASSES):
            wanted = "one backend each for one or more of " + ", ".join(ROW_CLASSES)
            raise ValueError(complaint(f"parts of composition {self.name!r}", repr(self.parts), wanted))

    @property
    def pairs(self) -> tuple[tuple[RowClass, str], ...]:
        """Row class and backend of each part."""
        return cast(tuple[tuple[RowClass, str], ...], self.parts)

    def part(self, row_class: RowClass) -> str | None:
        """The backend that runs a row class, or ``None``."""
        return dict(self.pairs).get(row_class)
