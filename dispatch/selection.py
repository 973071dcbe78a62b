"""The answer of the selector, as data: every candidate of every row class with its verdict, and who decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attnmux.dispatch.device import Device
from attnmux.dispatch.platform import Order
from attnmux.dispatch.query import Lengths
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.spec import AttentionSpec, RowClass

Status = Literal["selected", "eligible", "rejected"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's verdict for one row class.

    Args:
        name: the backend.
        rank: its place in the order, from 1; ``None`` when no order names it.
        status: ``selected``, ``eligible`` (could run, came later) or ``rejected``.
        reasons: why it was rejected; empty otherwise.
        notes: what holds for a dry run: a package not installed here, code that is not in yet.
        origin: who put it in the order: ``platform cuda_sm90``, ``prefer (argument)``, a composition's name.
    """

    name: str
    rank: int | None
    status: Status
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    origin: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank,
            "status": self.status,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "notes": list(self.notes),
            "origin": self.origin,
        }


@dataclass(frozen=True, slots=True)
class Ranking:
    """The candidates of one row class under one order, best first, and the order that decided."""

    order: Order
    candidates: tuple[Candidate, ...]

    @property
    def backend(self) -> str | None:
        return next((c.name for c in self.candidates if c.status == "selected"), None)

    def to_dict(self) -> dict[str, Any]:
        order = self.order
        decided = {"names": list(order.names), "reason": order.reason, "when": str(order.when), "source": order.source}
        return {
            "backend": self.backend,
            "q_len": order.q_len,
            "kv_len": order.kv_len,
            "order": decided,
            "candidates": [c.to_dict() for c in self.candidates],
        }


@dataclass(frozen=True, slots=True)
class ClassDecision:
    """What runs the rows of one class.

    Args:
        row_class: the class.
        default: the ranking for rows outside every band.
        bands: rankings for bands of query or key length, first match wins.
        notes: preferences that could not be followed, and why.
        hints: what would change the answer.
    """

    row_class: RowClass
    default: Ranking
    bands: tuple[Ranking, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def backend(self) -> str | None:
        """The backend of rows outside every band, or ``None``."""
        return self.default.backend

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return self.default.candidates

    @property
    def ranked(self) -> tuple[str, ...]:
        """The backends that can run the class, best first."""
        return tuple(c.name for c in self.candidates if c.status != "rejected")

    @property
    def rejected(self) -> dict[str, tuple[Reason, ...]]:
        """Name -> reasons of those that cannot."""
        return {c.name: c.reasons for c in self.candidates if c.status == "rejected"}

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend that some row of the class may go to."""
        found = (self.default.backend, *(band.backend for band in self.bands))
        return tuple(dict.fromkeys(name for name in found if name))

    def route(self, q_len: int, kv_len: int) -> str | None:
        """The backend for a row of so many query tokens and keys."""
        for band in self.bands:
            if _within(q_len, band.order.q_len) and _within(kv_len, band.order.kv_len):
                return band.backend
        return self.default.backend


def _within(length: int, band: tuple[int, int | None] | None) -> bool:
    return band is None or (band[0] <= length and (band[1] is None or length <= band[1]))


@dataclass(frozen=True, slots=True)
class Selection:
    """Which kernel runs which rows of a spec on a device, and why every other one was passed over.

    Args:
        spec, device, lengths: the question.
        classes: the decision for each row class the spec can produce.
        name: a registered composition's name, the single backend's, or the parts joined with ``+``.
        graphs: row classes that a CUDA graph may capture, each with the backends that forbid it (empty when none does).
    """

    spec: AttentionSpec
    device: Device
    lengths: Lengths
    name: str
    classes: dict[RowClass, ClassDecision]
    graphs: dict[RowClass, tuple[str, ...]] = field(default_factory=dict)
    complete: bool = field(init=False)
    """Whether every row class, and every band of it, has a backend."""

    def __post_init__(self) -> None:
        complete = all(d.backend and all(b.backend for b in d.bands) for d in self.classes.values())
        object.__setattr__(self, "complete", complete)  # worked out once: every memoised select() asks

    @property
    def routes(self) -> dict[RowClass, str]:
        """Row class -> backend, for the classes that have one."""
        return {c: d.backend for c, d in self.classes.items() if d.backend is not None}

    @property
    def backends(self) -> tuple[str, ...]:
        """Every backend in use, each once."""
        return tuple(dict.fromkeys(name for d in self.classes.values() for name in d.backends))

    @property
    def rejected(self) -> dict[str, tuple[Reason, ...]]:
        """Names that can run no class at all, with their reasons, each once."""
        decisions = list(self.classes.values())
        names = dict.fromkeys(name for d in decisions for name in d.rejected)
        return {n: tuple(dict.fromkeys(r for d in decisions for r in d.rejected[n])) for n in names if all(n in d.rejected for d in decisions)}

    def explain(self) -> str:
        """The whole answer as text: routes, rules, verdicts, reasons, and what would change it."""
        from attnmux.dispatch.explain import explain

        return explain(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``version`` changes when the form does."""
        return {
            "version": 1,
            "spec": self.spec.to_dict(),
            "device": self.device.to_dict(),
            "lengths": self.lengths,
            "name": self.name,
            "routes": dict(self.routes),
            "complete": self.complete,
            "graphs": {c: list(blockers) for c, blockers in self.graphs.items()},
            "classes": {
                c: {
                    **d.default.to_dict(),
                    "bands": [band.to_dict() for band in d.bands],
                    "notes": list(d.notes),
                    "hints": list(d.hints),
                }
                for c, d in self.classes.items()
            },
            "rejected": {name: [reason.to_dict() for reason in reasons] for name, reasons in self.rejected.items()},
        }
