"""Checks that what is not claimed is refused, with reasons that are true, and that what is claimed is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.dispatch import host
from attnmux.dispatch.query import Query
from attnmux.dispatch.selection import Candidate
from attnmux.dispatch.spec import AttentionSpec, RowClass, show
from attnmux.testing.check import Check, Skip, require
from attnmux.testing.features import FEATURES
from attnmux.testing.sampling import SIZES, VALUES, Subject, base_spec, changed, variants

IMPLAUSIBLE: dict[str, tuple[Any, ...]] = {"head_size": (1, 24, 1000), "page_size": (3, 4096), "v_head_size": (8,)}
"""Values that few backends take, so that a claim without limits has to prove itself."""


def checks(subject: Subject) -> Iterator[Check]:
    """Need no hardware: a device known by name will do."""
    for feature in FEATURES:
        summary = f"select accepts {feature.name} exactly where a claim covers it"
        yield Check(f"refusals/{feature.name}", subject.name, summary, lambda on=dict(feature.on): _agrees(subject, [on]))  # type: ignore[misc]
    for field in SIZES:
        changes = [{field: value} for value in (*VALUES[field], *IMPLAUSIBLE.get(field, ()))]
        summary = f"select accepts a {field} exactly where a claim covers it"
        yield Check(f"refusals/{field}", subject.name, summary, lambda changes=changes: _agrees(subject, changes))  # type: ignore[misc]
    yield Check("refusals/claimed-is-accepted", subject.name, "select accepts every claimed variant", lambda: _claimed_is_accepted(subject))


def _agrees(subject: Subject, changes: list[dict[str, Any]]) -> None:
    asked = 0
    for _, claim in subject.claims():
        base = base_spec(claim, subject.device)
        for change in changes:
            spec = changed(base, change) if base is not None else None
            for row_class in spec.row_classes if spec is not None else ():
                asked += 1
                _hold(subject, spec, row_class, tuple(change))  # type: ignore[arg-type]
    if not asked:
        raise Skip(f"no claim for {subject.device.name} can be combined with it")


def _hold(subject: Subject, spec: AttentionSpec, row_class: RowClass, fields: tuple[str, ...]) -> None:
    """Selection against the claims themselves."""
    query = Query(spec, subject.device, row_class)
    refusals = [claim.refusals(query) for _, claim in subject.claims()]
    candidate = _candidate(subject, spec, row_class)
    if not all(refusals):
        require(
            subject.stopped or candidate.status != "rejected", f"{spec.describe()}: claimed for {row_class} rows, but refused: {_said(candidate)}"
        )
        return
    require(candidate.status == "rejected", f"{spec.describe()}: no claim covers it for {row_class} rows, yet select accepts it")
    require(candidate.reasons and all(str(r) for r in candidate.reasons), f"{spec.describe()}: refused without a reason")
    for reason in candidate.reasons:
        if reason.code == "unsupported":
            offered = show(query.value(reason.field))
            require(reason.offered == offered, f"the reason {str(reason)!r} speaks of {reason.offered}, the spec has {reason.field} {offered}")
    for field in fields:
        if all(any(reason.field == field for reason in refused) for refused in refusals):
            require(
                any(r.field == field for r in candidate.reasons),
                f"{spec.describe()}: every claim refuses {field}, the reasons do not: {_said(candidate)}",
            )


def _claimed_is_accepted(subject: Subject) -> None:
    if subject.stopped:
        raise Skip(subject.stopped)
    for variant in variants(subject):
        for row_class in variant.classes:
            decision = host.answer(variant.spec, subject.device, require=subject.name, lengths=variant.lengths).classes[row_class]
            require(decision.backend == subject.name, f"{variant.label}: {row_class} rows go to {decision.backend}")


def _candidate(subject: Subject, spec: AttentionSpec, row_class: RowClass) -> Candidate:
    decision = host.answer(spec, subject.device, require=subject.name).classes[row_class]
    return next(c for c in decision.candidates if c.name == subject.name)


def _said(candidate: Candidate) -> str:
    return "; ".join(map(str, candidate.reasons))
