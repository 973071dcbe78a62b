"""A step's plan: rows sent to their backends, each with its prepared state. Shared by all layers of a group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.batch_checks import check_batch, page_bounds
from attnmux.dispatch.call_checks import call_signature, check_run, recurs
from attnmux.dispatch.errors import complaint, suggest
from attnmux.dispatch.forms import Form, form_of, is_whole
from attnmux.dispatch.operator import new_handle
from attnmux.dispatch.part import Part, token_index
from attnmux.dispatch.rows import Group, class_signature, group_rows
from attnmux.dispatch.spec import ROW_CLASSES, RowClass

if TYPE_CHECKING:
    from attnmux.dispatch.attention import Attention


class Plan:
    """Made by :meth:`Attention.plan`; several may be live. Read-only for users.

    Attributes:
        batch: the batch it was made for.
        row_classes: class of each row, ``None`` for rows without query tokens.
        routes: row class -> backends that run its rows in this step.
        num_tokens: query tokens it covers; later tokens of ``q`` are padding.
        handle: 0-d int64 host tensor, the same for the plan's life, refreshed or not.
    """

    def __init__(self, attention: Attention, batch: Batch) -> None:
        self.attention = attention
        self.handle = new_handle(self)
        self.row_classes: tuple[RowClass | None, ...] = ()
        self._row_routes: Sequence[str | None] = ()
        self._form: Form | None = None
        self._ready = False
        self._parts: list[Part] = []
        self._by_class: dict[RowClass, list[Part]] = {}
        self._made: dict[tuple[RowClass | None, str, RowClass | None], Part] = {}  # by class that ran alone, backend, and class of a split route
        self._fixed: Sequence[tuple[RowClass, str] | None] = ()
        self._checked: dict[Hashable, object] = {}  # forms of calls that were checked for this step
        self._prepare(batch)

    def refresh(self, batch: Batch) -> None:
        """The same plan for another step.

        Raises:
            ValueError: the rows' classes or routes differ from before. A row may become padding (no query tokens) and come back; a row that
                was padding when the plan was made may only take a class that other rows had then. Or a CUDA graph holds launches of some
                rows, and their tokens begin elsewhere now.
        """
        self._prepare(batch)

    @property
    def routes(self) -> dict[RowClass, tuple[str, ...]]:
        found: dict[RowClass, dict[str, None]] = {}
        for row_class, backend in zip(self.row_classes, self._row_routes, strict=True):
            if row_class is not None and backend is not None:
                found.setdefault(row_class, {})[backend] = None
        return {c: tuple(found[c]) for c in ROW_CLASSES if c in found}

    def execute(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, only: str | None, layer: LayerArgs) -> None:
        """Check one layer's tensors, then run every part. Called by the operator."""
        attn = self.attention
        if not self._ready:
            raise RuntimeError("the plan is half made: its last refresh failed in a backend; refresh it again, or make a new plan")
        check_run(attn.spec, self.num_tokens, self._bounds, q, k_cache, v_cache, out, lse, layer, attn.torch_device, attn.synchronise)
        if not attn.synchronise and recurs(signature := call_signature(q, k_cache, v_cache, out, lse, *layer[:5])):
            layer = layer._replace(form=self._checked.setdefault(signature, object()))
        self._run(q, k_cache, v_cache, out, lse, only, layer)

    def execute_known(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor | None, lse: Tensor | None, only: str | None, *layer: Any
    ) -> bool:
        """The same without checks, if a plain call like this one has passed them in this step; otherwise nothing, and false. ``layer``: its sinks,
        slopes and scales.
        """
        form = self._checked.get(call_signature(q, k_cache, v_cache, out, lse, *layer)) if self._checked else None
        if form is None or out is None:
            return False
        self._run(q, k_cache, v_cache, out, lse, only, LayerArgs._make((*layer, form)))
        return True

    def _run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, lse: Tensor | None, only: str | None, layer: LayerArgs) -> None:
        with self.attention.lock:
            for part in self._parts if only is None else self._parts_of(only):
                part.run(q, k_cache, v_cache, out, lse, layer)

    def _prepare(self, batch: Batch) -> None:
        attn = self.attention
        check_batch(attn.spec, batch, attn.torch_device, attn.limits, attn.synchronise)
        form = form_of(attn.spec, batch, attn.selection_for(batch.lengths))
        fixed = self._still_fixed(form)
        found = {only: self._groups(batch, form, fixed, only) for only in dict.fromkeys((None, *self._by_class, *(key[0] for key in self._made)))}
        for (only, *_), part in self._made.items():
            part.check_replay(*found[only], batch.query_lens)
        bounds = page_bounds(attn.spec, batch) if attn.synchronise else None
        self._checked.clear()
        self._ready = False  # backends write into what they prepared before
        groups, whole = found[None]
        parts = [self._part(batch, group, whole, None) for group in groups]
        self._by_class = {row_class: self._alone(batch, parts, row_class, *found[row_class]) for row_class in self._by_class}
        self.batch, self.num_tokens, self.row_classes, self._row_routes = batch, form.num_tokens, form.classes, form.routes
        self._bounds, self._parts, self._fixed, self._form = bounds, parts, fixed, form
        self._ready = True

    def _still_fixed(self, form: Form) -> Sequence[tuple[RowClass, str] | None]:
        """Class and route of each row, now or when it last had tokens: what a captured graph has baked in. A row that never had tokens may only
        join a class that others were planned in.
        """
        before, now = self._fixed, form.fixed
        if self._form is None or form is self._form:  # a new plan, or rows of the same lengths as last time
            return before or now
        held = set(before)  # what a graph holds launches for
        if len(before) != len(now) or any(
            new and (old[0] != new[0] if old else new[0] not in {each[0] for each in held if each}) for old, new in zip(before, now, strict=True)
        ):
            was, wanted = class_signature([old and old[0] for old in before]), class_signature(form.classes)
            if was == wanted:
                row = next(i for i, (old, new) in enumerate(zip(before, now, strict=True)) if new and (old is None or old[0] != new[0]))
                wanted = f"row {row} to be {form.classes[row]}"
            raise ValueError(complaint("into", f"a plan of {was}", wanted, "make a new plan"))
        for row, (old, new) in enumerate(zip(before, now, strict=True)):
            if old and new and old != new:
                raise ValueError(
                    complaint("into", f"a plan that sends row {row} to {old[1]}", new[1], "its new length is in another band: make a new plan")
                )
        fixed = tuple(new or old for old, new in zip(before, now, strict=True))
        return now if fixed == now else fixed

    def _groups(self, batch: Batch, form: Form, fixed: Sequence[tuple[RowClass, str] | None], only: RowClass | None) -> tuple[Sequence[Group], bool]:
        """The groups of all rows or of one class, and whether one group is the whole batch. Padding stays in the group it was planned in, so
        that a refreshed plan hands a backend the same rows as before.
        """
        if only is None and fixed is form.fixed:
            return form.groups, form.whole
        groups = group_rows([each and each[1] for each in fixed], batch.query_lens, [each and each[0] for each in fixed], only)
        return groups, is_whole(groups, fixed)

    def _alone(self, batch: Batch, parts: Sequence[Part], row_class: RowClass, groups: Sequence[Group], whole: bool) -> list[Part]:
        """What runs one class: parts of the plan that hold nothing else, and parts of its own where a route has rows of other classes too. What
        was made once is kept: a graph may hold it.
        """
        shared = {(part.group.backend, part.group.rows): part for part in parts}
        found = []
        for group in groups:
            own = (row_class, group.backend, group.row_class) in self._made
            part = None if own else shared.get((group.backend, group.rows))
            found.append(part or self._part(batch, group, whole, row_class))
        return found

    def _part(self, batch: Batch, group: Group, whole: bool, only: RowClass | None) -> Part:
        attn, key = self.attention, (only, group.backend, group.row_class)
        before = self._made.get(key)
        backend = attn.backend(group.backend)
        rows = batch if whole else batch.take(group.rows)
        index = stream = None
        if group.tokens is None and not whole:
            index = token_index(group.rows, batch.query_lens, attn.torch_device)
            stream = torch.cuda.current_stream(attn.torch_device) if index.is_cuda else None
            if before is not None and before.captured and before.index is not None:
                index = before.index.copy_(index, non_blocking=True)
        previous = before.state if before is not None and before.seqs == rows.num_seqs else None
        state = backend.plan(rows, attn.workspace_for(backend, rows), previous)
        captured = before is not None and before.captured
        part = self._made[key] = Part(group, rows.num_seqs, backend, state, index, stream, captured)
        return part

    def _parts_of(self, only: str) -> list[Part]:
        if not isinstance(only, str) or only not in self.attention.spec.row_classes:
            raise ValueError(f"only is {only!r}, wanted a row class of the spec: {suggest(str(only), self.attention.spec.row_classes)}")
        row_class: RowClass = only
        if row_class not in self._by_class and self._form is not None:
            if self.attention.torch_device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"only={only!r} runs for the first time with this plan, which prepares its rows: run it once before capturing")
            found = self._groups(self.batch, self._form, self._fixed, row_class)
            self._by_class[row_class] = self._alone(self.batch, self._parts, row_class, *found)
        return self._by_class[row_class]
