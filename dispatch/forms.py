"""What a step's row lengths decide: classes, routes and groups of rows. Remembered, since steps of the same form come again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.errors import NoBackendError
from attnmux.dispatch.rows import Group, classify, classify_text, group_rows
from attnmux.dispatch.selection import Selection
from attnmux.dispatch.spec import AttentionSpec, RowClass


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """Rows sorted out.

    Args:
        classes, routes, fixed: of each row its class, its route, and both; ``None`` for rows without query tokens.
        groups: rows by route.
        whole: whether one group holds every row that has a class.
        num_tokens: query tokens of all rows.
    """

    classes: tuple[RowClass | None, ...]
    routes: tuple[str | None, ...]
    fixed: tuple[tuple[RowClass, str] | None, ...]
    groups: tuple[Group, ...]
    whole: bool
    num_tokens: int


def form_of(spec: AttentionSpec, batch: Batch, selection: Selection) -> Form:
    """The form of a batch.

    Raises:
        NoBackendError: a row's class has no backend at its length.
    """
    banded = any(decision.bands for decision in selection.classes.values())
    if banded or (spec.mm_prefix is not None and batch.mm_spans is not None):
        return _sort_out(classify(spec, batch), batch.query_lens, batch.key_lens, selection)
    return _text_form(spec, tuple(batch.query_lens), _ById(selection))


class _ById:
    """A selection as a key: hashing it whole would take longer than what is remembered."""

    __slots__ = ("selection",)

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.selection is self.selection

    def __hash__(self) -> int:
        return id(self.selection)


@lru_cache(maxsize=512)
def _text_form(spec: AttentionSpec, query_lens: tuple[int, ...], key: _ById) -> Form:
    return _sort_out(classify_text(spec, query_lens), query_lens, query_lens, key.selection)  # without bands key lengths decide nothing


def _sort_out(classes: Sequence[RowClass | None], query_lens: Sequence[int], key_lens: Sequence[int], selection: Selection) -> Form:
    routes = tuple(None if c is None else _route(selection, c, q, k) for c, q, k in zip(classes, query_lens, key_lens, strict=True))
    groups = tuple(group_rows(routes, query_lens, classes))
    fixed = tuple(None if c is None or r is None else (c, r) for c, r in zip(classes, routes, strict=True))
    return Form(tuple(classes), routes, fixed, groups, is_whole(groups, fixed), sum(query_lens))


def is_whole(groups: Sequence[Group], fixed: Sequence[object | None]) -> bool:
    """Whether one group holds every row that has a class."""
    return len(groups) == 1 and len(groups[0].rows) == sum(row is not None for row in fixed)


def _route(selection: Selection, row_class: RowClass, q_len: int, kv_len: int) -> str:
    backend = selection.classes[row_class].route(q_len, kv_len)
    if backend is None:
        from attnmux.dispatch.explain import explain_failure

        raise NoBackendError(explain_failure(selection), selection)
    return backend
