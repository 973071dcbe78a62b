"""What would change an answer: found by asking the selector again about a changed question, never by guessing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnmux.dispatch.query import Query
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.selection import Candidate, ClassDecision

Wins = Callable[[str, Query], bool]
"""Whether a backend would be the one to run a query, everything else being equal."""

PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
_FREE_FIELDS = ("page_size", "kv_layout")
"""What an engine may choose freely; other fields are the model's."""


def hints_for(query: Query, decision: ClassDecision, wins: Wins) -> tuple[str, ...]:
    """Sentences, each a change after which the named backend runs the class: cache layouts, installs, settings, preferences."""
    hints: list[str] = []
    better: list[frozenset[str]] = []  # what would let a candidate run that stands before the one at hand
    for candidate in decision.candidates:
        if candidate.status == "selected":
            break
        if candidate.rank is None:
            continue
        if all(reason.field in _FREE_FIELDS for reason in candidate.reasons):
            if layouts := _layouts(candidate.name, query, wins):
                hints.append(f"{_choice(candidate)} would run with {layouts}")
            continue
        changes, sentence = _changes(candidate)
        if sentence and not any(fewer <= changes for fewer in better):
            hints.append(sentence)
            better.append(changes)
    hints.extend(_by_preference(query, decision))
    return tuple(hints)


def _choice(candidate: Candidate) -> str:
    return f"{candidate.name} (choice {candidate.rank})"


def _changes(candidate: Candidate) -> tuple[frozenset[str], str]:
    """What stands in a candidate's way, and the sentence that says so; empty when more than one thing of the model's does."""
    reasons = candidate.reasons
    if all(reason.todo for reason in reasons):
        todos = tuple(dict.fromkeys(reason.todo for reason in reasons))
        return frozenset(todos), f"{_choice(candidate)} would run after: {'; '.join(todos)}"
    if len(reasons) == 1 and _of_the_model(reasons[0]):
        return frozenset({reasons[0].field}), f"{_choice(candidate)} would run but for {reasons[0].field} {reasons[0].offered}"
    return frozenset(), ""


def _of_the_model(reason: Reason) -> bool:
    return reason.code == "unsupported" and reason.field not in _FREE_FIELDS


def _layouts(name: str, query: Query, wins: Wins) -> str:
    """The page sizes and layouts at which a backend would be the one to run the query."""
    if query.spec.page_size is None:
        return ""
    found: dict[str, list[str]] = {}
    for layout in ("NHD", "HND"):
        for page_size in PAGE_SIZES:
            if wins(name, replace(query, spec=query.spec.replace(page_size=page_size, kv_layout=layout))):
                found.setdefault(layout, []).append(str(page_size))
    return "; ".join(f"kv_layout {layout} and page_size {' '.join(sizes)}" for layout, sizes in found.items())


def _by_preference(query: Query, decision: ClassDecision) -> list[str]:
    runner_up = next((c for c in decision.candidates if c.status == "eligible"), None)
    if runner_up is not None:
        return [f'prefer={{"{query.row_class}": "{runner_up.name}"}} would run {runner_up.name}, which can too']
    if decision.backend is not None:
        return []
    unnamed = [c.name for c in decision.candidates if [reason.code for reason in c.reasons] == ["not-ordered"]]
    return [f'prefer={{"{query.row_class}": "{name}"}} would run {name}, which no order names' for name in unnamed]
