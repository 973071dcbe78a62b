"""A selection as text. The only place that formats one; the same answer as data is ``Selection.to_dict``."""

from __future__ import annotations

from itertools import groupby

from attnmux.dispatch.platform import ALWAYS, Band, Order
from attnmux.dispatch.selection import Candidate, ClassDecision, Ranking, Selection

_MARKS = {"selected": "*", "eligible": "+", "rejected": "-"}


def explain(selection: Selection) -> str:
    """Question, routes, then each row class: the rule that decided, every candidate's verdict, what would change it."""
    device = selection.device
    where = f"{device.name} ({device.title}), platform {device.platform}"
    lines = [
        f"asked   {selection.spec.describe()}",
        f"device  {where}{'' if device.real else ', dry run'}",
        *(f"        {note}" for note in device.notes),
        f"answer  {selection.name}" + ("" if selection.complete else " (incomplete: some row class has no backend)"),
    ]
    for row_class, decision in selection.classes.items():
        lines.append(
            f"        {row_class:8s} {decision.backend or 'none'}" + "".join(f", {_band(b.order)}: {b.backend or 'none'}" for b in decision.bands)
        )
    lines.extend(_graph_lines(selection))
    for decisions in _alike(selection):
        lines.append("")
        lines.extend(_class_lines(decisions))
    lines += ["", "* selected  + could run  - cannot"]
    return "\n".join(lines)


def explain_failure(selection: Selection) -> str:
    """The message of :class:`NoBackendError`."""
    device = selection.device
    empty = [d for d in selection.classes.values() if not (d.backend and all(b.backend for b in d.bands))]
    classes = ", ".join(d.row_class for d in empty)
    lines = [f"no backend can run {classes} rows of {selection.spec.describe()} on {device.name} ({device.title})"]
    for decision in empty:
        for ranking in (decision.default, *decision.bands):
            if ranking.backend is None:
                lines.append(f"  {decision.row_class}{', ' + _band(ranking.order) if ranking.order.banded else ''}:")
                lines.extend(f"    {c.name}: {'; '.join(map(str, c.reasons))}" for c in ranking.candidates)
        lines.extend(f"    to change that: {hint}" for hint in decision.hints)
    return "\n".join(lines)


def _alike(selection: Selection) -> list[list[ClassDecision]]:
    """Neighbouring row classes that were decided alike are shown once."""

    def key(decision: ClassDecision) -> object:
        rankings = (decision.default, *decision.bands)
        verdicts = [(c.name, c.status, tuple(str(r) for r in c.reasons if r.code != "row-class"), c.notes) for r in rankings for c in r.candidates]
        return [r.order for r in rankings], verdicts, decision.notes

    return [list(group) for _, group in groupby(selection.classes.values(), key)]


def _class_lines(decisions: list[ClassDecision]) -> list[str]:
    names = ", ".join(d.row_class for d in decisions)
    lines: list[str] = []
    for ranking in (*decisions[0].bands, decisions[0].default):
        lines.append(f"{names}{' ' + _band(ranking.order) if ranking.order.banded else ''}: {_rule(ranking)}")
        elsewhere = [c for c in ranking.candidates if c.rank is None and c.reasons and c.reasons[0].code == "device"]
        shown = [c for c in ranking.candidates if c not in elsewhere]
        width = max((len(c.name) for c in shown), default=0)
        lines.extend(_candidate_line(c, width) for c in shown)
        if elsewhere:
            lines.append("  -    for other devices: " + ", ".join(f"{c.name} ({c.reasons[0].wanted})" for c in elsewhere))
    for title, texts in (("note", [n for d in decisions for n in d.notes]), ("change", [h for d in decisions for h in d.hints])):
        lines.extend(f"  {title}: {text}" for text in dict.fromkeys(texts))
    return lines


def _rule(ranking: Ranking) -> str:
    order = ranking.order
    condition = "" if order.when == ALWAYS else f" [{order.when}]"
    source = f"{order.source}{condition}: " if order.source else ""
    return f"{source}{order.reason}"


def _candidate_line(candidate: Candidate, width: int) -> str:
    rank = f"{candidate.rank:2d}" if candidate.rank is not None else "  "
    said = "; ".join(map(str, candidate.reasons))
    if candidate.notes and candidate.status != "rejected":
        said = "here: " + "; ".join(candidate.notes)
    via = f"[{candidate.origin}] " if candidate.origin and not candidate.origin.startswith("platform ") else ""
    return f"  {_MARKS[candidate.status]} {rank} {candidate.name:{width}s}  {via}{said}".rstrip()


def _graph_lines(selection: Selection) -> list[str]:
    if selection.device.type == "cpu":
        return []
    blocked = {c: names for c, names in selection.graphs.items() if names}
    captured = [c for c in selection.graphs if c not in blocked]
    lines = [f"graphs  {', '.join(captured) or 'no'} rows can be captured"]
    lines.extend(f"        {c} rows cannot: {', '.join(names)} is not capturable" for c, names in blocked.items())
    return lines


def _band(order: Order) -> str:
    def text(name: str, band: Band | None) -> str:
        if band is None:
            return ""
        return f"{name} {band[0]}+" if band[1] is None else f"{name} {band[0]}-{band[1]}"

    return " ".join(filter(None, (text("q_len", order.q_len), text("kv_len", order.kv_len))))
