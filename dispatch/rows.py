"""Which rows belong to which class and route, and which keys a row may see. Host arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, ROW_CLASSES, AttentionSpec, RowClass


def classify(spec: AttentionSpec, batch: Batch) -> list[RowClass | None]:
    """The class of each row, ``None`` for rows without query tokens."""
    classes = classify_text(spec, batch.query_lens)
    if spec.mm_prefix and batch.mm_spans is not None:
        for row, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            first = 0 if batch.lengths == "upper_bound" else kv_len - q_len  # a bound does not say where the tokens are
            if q_len and any(end > first for _, end, _ in batch.spans(row)):
                classes[row] = "image"
    return classes


def classify_text(spec: AttentionSpec, query_lens: Sequence[int]) -> list[RowClass | None]:
    """The class that each row has by its length alone."""
    most = 0 if spec.attn_type == "encoder_only" else MAX_DECODE_TOKENS
    return [None if n == 0 else "decode" if n <= most else "prefill" for n in query_lens]


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that go to one backend in one call.

    Args:
        backend: its name.
        rows: their indices, ascending.
        tokens: ``(first, last + 1)`` where their tokens stand together, else ``None`` and they must be gathered.
        row_class: set where the backend's rows are split by class, so that none has to be gathered.
    """

    backend: str
    rows: tuple[int, ...]
    tokens: tuple[int, int] | None
    row_class: RowClass | None = None

    @property
    def first(self) -> int:
        """Where its tokens begin, if they stand together."""
        return self.tokens[0] if self.tokens else 0


def group_rows(
    routes: Sequence[str | None], query_lens: Sequence[int], classes: Sequence[RowClass | None] = (), only: RowClass | None = None
) -> list[Group]:
    """Rows by backend, in order of first appearance; rows without a route, or of another class than ``only``, are left out.

    Rows stand together if no row of another group is between them, whether or not it has tokens in this step. Where a backend's rows do not,
    but those of each class do, each class is a group: calls over views cost less than copies.
    """
    starts = [0]
    for n in query_lens:
        starts.append(starts[-1] + n)
    present = [row for row, route in enumerate(routes) if route is not None]
    order = {row: place for place, row in enumerate(present)}

    def group(rows: Sequence[int], row_class: RowClass | None = None) -> Group:
        together = all(order[a] + 1 == order[b] for a, b in pairwise(rows))
        return Group(routes[rows[0]] or "", tuple(rows), (starts[rows[0]], starts[rows[-1] + 1]) if together else None, row_class)

    by_route: dict[str | None, list[int]] = {}
    for row in present:
        if only is None or classes[row] == only:
            by_route.setdefault(routes[row], []).append(row)
    groups: list[Group] = []
    for rows in by_route.values():
        one = group(rows)
        kinds = dict.fromkeys(classes[row] for row in rows) if classes and one.tokens is None else {}
        apart = [group([row for row in rows if classes[row] == kind], kind) for kind in kinds]
        groups.extend(apart if len(apart) > 1 and all(each.tokens for each in apart) else [one])
    return groups


def visible_keys(spec: AttentionSpec, batch: Batch, row: int, prefix_len: int = 0, causal: bool = True) -> list[tuple[int, int]]:
    """Half-open key ranges outside which no token of the row sees anything. May overlap, may be generous, never too small."""
    q_len, kv_len = batch.query_lens[row], batch.key_lens[row]
    if q_len == 0 or kv_len == 0:
        return []
    first = kv_len - q_len  # position of the first query token
    if spec.attn_type == "cross":
        return [(0, kv_len)]
    if spec.rswa_window is not None:
        return [(0, min(prefix_len, kv_len)), (max(0, first - spec.rswa_window + 1), kv_len)]
    lo = 0
    if spec.sliding_window is not None:
        lo = max(lo, first - spec.sliding_window + 1)
    if spec.chunk is not None:
        size, lookback = spec.chunk
        lo = max(lo, (max(first, 0) // size - lookback) * size)
    ranges = [(max(lo, 0), kv_len)]
    if spec.mm_prefix == "override_window":
        spans = batch.spans(row)
        groups = {group for start, end, group in spans if end > first and group is not None}
        ranges += [(start, min(end, kv_len)) for start, end, group in spans if end > first or group in groups]
    return ranges


def class_signature(classes: Sequence[RowClass | None]) -> str:
    """Row classes as text for an error: ``2 decode, 1 prefill``."""
    counts = {c: sum(x == c for x in classes) for c in ROW_CLASSES}
    empty = sum(c is None for c in classes)
    parts = [f"{n} {c}" for c, n in counts.items() if n] + ([f"{empty} empty"] if empty else [])
    return ", ".join(parts) or "no rows"
