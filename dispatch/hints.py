"""What would change an answer: found by asking the selector's judge again about a changed spec, never by guessing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from attnmux.dispatch.query import Query
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.registry import Catalog
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selection import Candidate, ClassDecision
from attnmux.dispatch.steering import Steered

Judge = Callable[[str, Query, Catalog, Toolchain, Steered], tuple[tuple[Reason, ...], tuple[str, ...]]]

PAGE_SIZES = (1, 8, 16, 32, 64, 128, 256)
_FREE_FIELDS = ("page_size", "kv_layout")
"""What an engine may choose freely; other fields are the model's."""


def hints_for(query: Query, decision: ClassDecision, catalog: Catalog, toolchain: Toolchain, steered: Steered, judge: Judge) -> tuple[str, ...]:
    """Sentences, each a change that was tried: cache layouts, installs, settings, preferences."""
    hints: list[str] = []
    for candidate in decision.candidates:
        if candidate.status == "selected":
            break
        if candidate.status == "rejected" and candidate.rank is not None:
            hints.extend(_hints_for_candidate(candidate, query, catalog, toolchain, steered, judge))
    runner_up = next((c for c in decision.candidates if c.status == "eligible"), None)
    if runner_up is not None:
        hints.append(f'prefer={{"{query.row_class}": "{runner_up.name}"}} would run {runner_up.name}, which can too')
    return tuple(dict.fromkeys(hints))


def _hints_for_candidate(candidate: Candidate, query: Query, catalog: Catalog, toolchain: Toolchain, steered: Steered, judge: Judge) -> list[str]:
    reasons = candidate.reasons
    if all(reason.field in _FREE_FIELDS for reason in reasons):
        layouts = _layouts(candidate.name, query, catalog, toolchain, steered, judge)
        return [f"{candidate.name} (choice {candidate.rank}) would run with {layouts}"] if layouts else []
    if all(reason.todo for reason in reasons):
        return [f"{candidate.name} (choice {candidate.rank}) would run after: " + "; ".join(r.todo for r in reasons)]
    model = [reason for reason in reasons if reason.code == "unsupported" and reason.field not in _FREE_FIELDS]
    if len(reasons) == 1 and model:
        return [f"{candidate.name} (choice {candidate.rank}) would run but for {model[0].field} {model[0].offered}"]
    return []


def _layouts(name: str, query: Query, catalog: Catalog, toolchain: Toolchain, steered: Steered, judge: Judge) -> str:
    """The page sizes and layouts at which a backend would accept the query, ``NHD: 16 64; HND: 16``."""
    if query.spec.page_size is None:
        return ""
    found: dict[str, list[str]] = {}
    for layout in ("NHD", "HND"):
        for page_size in PAGE_SIZES:
            spec = query.spec.replace(page_size=page_size, kv_layout=layout)
            if not judge(name, replace(query, spec=spec), catalog, toolchain, steered)[0]:
                found.setdefault(layout, []).append(str(page_size))
    return "; ".join(f"kv_layout {layout} and page_size {' '.join(sizes)}" for layout, sizes in found.items())
