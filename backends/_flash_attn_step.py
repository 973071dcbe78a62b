"""What both FlashAttention adapters keep of a step: row starts, key lengths and a block table, all on the device.

Neither kernel looks at an entry or a key at or beyond a row's key length, but both read whole key tiles from where a window
begins. So each row's table starts at the page of the first key that any of its tokens may see, and its length shrinks by as
much: causality and windows hang on a row's end, hence nothing else changes, and no page that nobody may see is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits

PACKED_PAGE = 16
"""Packed keys are read as pages that overlap: page ``i`` holds the keys from ``i`` on. Shorter than every key tile, see :mod:`_flash_attn_run`."""


@dataclass(slots=True)
class Step:
    """A planned step.

    Args:
        starts: int32 ``[seqs + 1]``, first query token of each row.
        lens: int32 ``[seqs]``, keys of each row from its table's first page on.
        table: int32 ``[seqs, cols]``, pages (packed: first keys of pages of :data:`PACKED_PAGE`).
        short: the same in pages of one key, ``[seqs, PACKED_PAGE]``, for packed keys fewer than a page; else ``None``.
        tokens: query tokens on the host.
        max_query_len: no row has more, also after a refresh.
        extra: what one of the kernels needs besides.
        raw_stream, stream: where the tensors were written, as a number and as an object (0 and ``None`` on a CPU).
        ready: when they were.
        used: the last run on each other stream, by its number: they must end before the tensors are written anew.
    """

    starts: Tensor
    lens: Tensor
    table: Tensor
    short: Tensor | None
    tokens: int
    max_query_len: int
    extra: Any = None
    raw_stream: int = 0
    stream: Any = None
    ready: Any = None
    used: dict[int, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """All that a launch reads besides the layer's own tensors."""
        yield from (value for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor))
        yield from (value for value in self.extra or () if isinstance(value, Tensor))

    def refill(self, fresh: Step) -> None:
        """Write another step of as many rows into the same memory. Entries beyond the other's columns are stale, and never read."""
        self.starts.copy_(fresh.starts)
        self.lens.copy_(fresh.lens)
        columns = min(self.table.shape[1], fresh.table.shape[1])
        self.table[:, :columns].copy_(fresh.table[:, :columns])
        if self.short is not None and fresh.short is not None:
            self.short.copy_(fresh.short)
        self.tokens = fresh.tokens

    def owned(self, columns: int) -> Step:
        """A copy in memory of its own, with room for so many columns."""
        kept = Step(
            self.starts.clone(), self.lens.clone(), self.table.new_empty((self.table.shape[0], columns)), None, self.tokens, self.max_query_len
        )
        kept.short = None if self.short is None else self.short.clone()
        kept.refill(self)
        return kept


def longest_query(spec: AttentionSpec, batch: Batch, limits: Limits | None) -> int:
    """Query tokens of a row at most: of this batch, or within limits of any that may be planned into the same state."""
    top = batch.longest_query
    if limits is None:
        return max(top, 1)
    if spec.attn_type != "encoder_only" and top <= MAX_DECODE_TOKENS:  # decode rows stay decode rows
        return min(MAX_DECODE_TOKENS, limits.max_query_len)
    return limits.max_query_len


def columns_for(spec: AttentionSpec, longest_keys: int, longest_query: int) -> int:
    """Columns that hold every page a row of so many keys and query tokens may see, one at least."""
    page = spec.page_size or PACKED_PAGE
    if spec.sliding_window is not None:
        before = 0 if spec.page_size is None else page - 1  # keys that share a page with the first visible one
        longest_keys = min(longest_keys, longest_query + spec.sliding_window - 1 + before)
    return max(1, -(-longest_keys // page))


def step_of(spec: AttentionSpec, batch: Batch, longest_query: int, columns: int) -> Step:
    """The step of a batch; its tensors may be the batch's own. Device arithmetic only.

    Args:
        longest_query: see :func:`longest_query`.
        columns: of the table, at most.
    """
    starts, lens = batch.query_start_loc.contiguous(), batch.seq_lens.contiguous()
    hidden = None
    if spec.sliding_window is not None:
        hidden = (lens - (starts[1:] - starts[:-1]) - (spec.sliding_window - 1)).clamp_(min=0)  # keys before the first that any token sees
    if spec.page_size is None:
        assert batch.kv_start_loc is not None
        first = batch.kv_start_loc[:-1]  # rows may stand in any order: an end is a start and a length
        if hidden is not None:
            first, lens = first + hidden, lens - hidden
        table = first[:, None] + torch.arange(0, columns * PACKED_PAGE, PACKED_PAGE, dtype=torch.int32, device=lens.device)
        short = first[:, None] + torch.arange(PACKED_PAGE, dtype=torch.int32, device=lens.device)
        return Step(starts, lens, table, short, batch.num_tokens, longest_query)
    assert batch.block_table is not None
    table = batch.block_table if batch.block_table.stride(-1) == 1 else batch.block_table.contiguous()
    if table.shape[1] == 0:  # no row has a key
        table = table.new_zeros((table.shape[0], 1))
    if hidden is not None:
        pages = hidden // spec.page_size
        index = pages[:, None] + torch.arange(columns, dtype=torch.int32, device=lens.device)
        table, lens = table.gather(1, index.clamp_(max=table.shape[1] - 1).long()), lens - pages * spec.page_size
    return Step(starts, lens, table[:, :columns], None, batch.num_tokens, longest_query)
