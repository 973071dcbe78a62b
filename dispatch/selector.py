"""The selector: a pure function of spec, device, catalog, toolchain and steering. It probes nothing and caches nothing."""

from __future__ import annotations

from dataclasses import replace

from attnmux.dispatch.catalog import Catalog
from attnmux.dispatch.device import Device
from attnmux.dispatch.hints import hints_for
from attnmux.dispatch.platform import Insertion, Order, Platform
from attnmux.dispatch.query import Lengths, Query
from attnmux.dispatch.reasons import Reason
from attnmux.dispatch.requirements import Toolchain
from attnmux.dispatch.selection import Candidate, ClassDecision, Ranking, Selection
from attnmux.dispatch.spec import AttentionSpec, RowClass
from attnmux.dispatch.steering import Steered

NO_ORDER = Order((), "no order of this platform matches")


def decide(spec: AttentionSpec, device: Device, lengths: Lengths, catalog: Catalog, toolchain: Toolchain, steered: Steered) -> Selection:
    """Answer one question. Never raises for want of a backend: an incomplete selection says why."""
    classes: dict[RowClass, ClassDecision] = {}
    for row_class in spec.row_classes:
        query = Query(spec, device, row_class, lengths)
        classes[row_class] = _decide_class(query, catalog, toolchain, steered)
    graphs = {c: tuple(n for n in d.backends if c not in catalog.backends[n].graphs) for c, d in classes.items()}
    return Selection(spec, device, lengths, _name(classes, catalog), classes, graphs)


def judge(name: str, query: Query, catalog: Catalog, toolchain: Toolchain, steered: Steered) -> tuple[tuple[Reason, ...], tuple[str, ...]]:
    """A backend's reasons against a query, and its notes in a dry run. No reason means it can run."""
    info = catalog.backends.get(name)
    if info is None:
        return (Reason("not-registered", name, name, "a registered backend"),), ()
    reasons: list[Reason] = []
    notes: list[str] = []
    if denying := steered.denying(name, query.row_class):
        reasons.append(Reason("denied", name, f"deny ({denying})", "no deny", f"remove {name} from deny ({denying})"))
    required = steered.required(query.row_class)
    wanted = [part for pick in required if (part := catalog.part(pick.name, query.row_class))]
    if required and name not in wanted:
        what = " or ".join(wanted) or " or ".join(pick.name for pick in required)
        reasons.append(Reason("not-required", name, required[0].source, what, f"drop require ({steered.requiring(query.row_class)})"))
    claim, refusals = info.judge(query, toolchain if query.device.real else None)
    reasons.extend(refusals)
    unmet = toolchain.unmet(info.requires)
    unmet_here = unmet if claim is None else unmet + toolchain.unmet(claim.requires)
    absent = [Reason("not-in-yet", name, "declared", "code")] if info.implementation is None else []
    absent += [Reason("load-failed", name, catalog.broken[name], "an import that works")] if name in catalog.broken else []
    if query.device.real:
        reasons.extend((*unmet, *absent))
    else:
        notes.extend(str(reason) for reason in (*unmet_here, *absent))
    return tuple(reasons), tuple(notes)


def _decide_class(query: Query, catalog: Catalog, toolchain: Toolchain, steered: Steered) -> ClassDecision:
    def wins(name: str, changed: Query) -> bool:
        *_, (order, rest) = _chain(changed, catalog, steered)
        for place in _places(order, rest, changed, catalog, steered):
            able = not judge(place, changed, catalog, toolchain, steered)[0]
            if able or place == name:
                return able and place == name
        return False

    rankings = [_rank(order, rest, query, catalog, toolchain, steered) for order, rest in _chain(query, catalog, steered)]
    decision = ClassDecision(query.row_class, rankings[-1], tuple(rankings[:-1]), _broken_preferences(query, rankings[-1], catalog, steered))
    return replace(decision, hints=hints_for(query, decision, wins))


def _chain(query: Query, catalog: Catalog, steered: Steered) -> list[tuple[Order, list[Order]]]:
    """The bands that apply, then the first order without one, each with the orders that stand below it."""
    orders = [order for order in steered.orders if order.when.matches(query)]
    orders += _platform_orders(catalog.platforms.get(query.device.platform), query, catalog)
    decisive = next((i for i, order in enumerate(orders) if not order.banded), None)
    if decisive is None:
        decisive = len(orders)
        orders.append(NO_ORDER)
    return [(orders[i], orders[i + 1 :]) for i in range(decisive + 1)]


def _platform_orders(platform: Platform | None, query: Query, catalog: Catalog) -> list[Order]:
    if platform is None:
        return []
    matching = [replace(o, source=o.source or f"platform {platform.name}") for o in platform.orders if o.when.matches(query)]
    for insertion in catalog.insertions:
        if insertion.when.matches(query):
            matching = [_insert(order, insertion) for order in matching]
    return matching


def _insert(order: Order, insertion: Insertion) -> Order:
    names = [name for name in order.names if name != insertion.name]
    if insertion.before is None:
        names.append(insertion.name)
    elif insertion.before == "*":
        names.insert(0, insertion.name)
    elif insertion.before in names:
        names.insert(names.index(insertion.before), insertion.name)
    else:
        return order
    return replace(order, names=tuple(names), reason=f"{order.reason}; {insertion.name} placed by {insertion.source}: {insertion.reason}")


def _rank(order: Order, rest: list[Order], query: Query, catalog: Catalog, toolchain: Toolchain, steered: Steered) -> Ranking:
    """Candidates best first, each with its verdict; those that no order names come last."""
    places = _places(order, rest, query, catalog, steered)
    candidates: list[Candidate] = []
    for name in (*places, *(n for n in catalog.backends if n not in places)):
        rank = len(candidates) + 1 if name in places else None
        reasons, notes = judge(name, query, catalog, toolchain, steered)
        if rank is None and not reasons:
            reasons = (Reason("not-ordered", name, query.device.name, "an order", f'prefer="{name}"'),)
        taken = any(c.status == "selected" for c in candidates)
        status = "rejected" if reasons else "eligible" if taken else "selected"
        candidates.append(Candidate(name, rank, status, reasons, notes, places.get(name, "")))  # type: ignore[arg-type]
    return Ranking(order, tuple(candidates))


def _places(order: Order, rest: list[Order], query: Query, catalog: Catalog, steered: Steered) -> dict[str, str]:
    """Backend -> who put it in its place: preferred, required, the order's, then what lower orders name."""
    places: dict[str, str] = {}

    def place(name: str, origin: str) -> None:
        part = catalog.part(name, query.row_class)
        if part is not None:
            places.setdefault(part, origin if part == name else f"{name}, {origin}")

    for pick in steered.prefer:  # before require: of several required ones the preferred comes first, others are refused anyway
        if pick.applies(query.row_class):
            place(pick.name, f"prefer ({pick.source})")
    for pick in steered.required(query.row_class):
        place(pick.name, f"require ({pick.source})")
    for lower in (order, *rest):
        for name in lower.names:
            place(name, lower.source)
        if not (lower.banded or lower.source in {o.source for o in steered.orders}):
            break  # a platform's own order is complete; a user's falls through to what stands below it
    return places


def _broken_preferences(query: Query, ranking: Ranking, catalog: Catalog, steered: Steered) -> tuple[str, ...]:
    notes = []
    by_name = {candidate.name: candidate for candidate in ranking.candidates}
    for pick in steered.prefer:
        part = catalog.part(pick.name, query.row_class) if pick.applies(query.row_class) else None
        if part is not None and by_name[part].status == "rejected":
            why = "; ".join(map(str, by_name[part].reasons))
            notes.append(f"prefer {pick.name} ({pick.source}) was not followed for {query.row_class}: {why}")
    return tuple(notes)


def _name(classes: dict[RowClass, ClassDecision], catalog: Catalog) -> str:
    routes = {c: d.backend for c, d in classes.items() if d.backend is not None}
    parts = tuple(dict.fromkeys(name for d in classes.values() for name in d.backends))
    if len(parts) == 1:
        return parts[0]
    one_each = all(len(d.backends) == 1 for d in classes.values())  # bands may send a class to several
    for composition in catalog.compositions.values():
        if one_each and all(composition.part(c) == backend for c, backend in routes.items()):
            return composition.name
    return "+".join(parts) or "none"
