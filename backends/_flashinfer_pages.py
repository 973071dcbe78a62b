"""From rows to FlashInfer's page lists: host arithmetic on exact lengths, and gathers on the device that never wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch, Span
from attnmux.dispatch.rows import visible_keys
from attnmux.dispatch.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a step's rows. Keys in front of a row's first visible page are cut away: causality and windows are relative to a row's
    end, so nothing changes but that no page is left there that must not be read.

    Args:
        size: keys a page holds; packed keys are pages of one.
        first: of each row the column of its first page.
        lens: of each row the keys from there on.
        indptr: ``[rows + 1]``, running sum of page counts.
        holes: ``(row, column, column)``, half-open: pages between a span and a window that no token sees.
    """

    size: int
    first: tuple[int, ...]
    lens: tuple[int, ...]
    indptr: tuple[int, ...]
    holes: tuple[tuple[int, int, int], ...] = ()

    @property
    def last(self) -> list[int]:
        """Keys in each row's last page, 0 for rows without keys."""
        return [(n - 1) % self.size + 1 if n else 0 for n in self.lens]

    @property
    def cut(self) -> list[int]:
        """Keys cut away in front of each row."""
        return [column * self.size for column in self.first]


def pages_of(spec: AttentionSpec, batch: Batch) -> Pages:
    """The pages that the rows of a batch with exact host lengths read. Rows without query tokens read none."""
    size = spec.page_size or 1
    first, lens, counts, holes = [], [], [], []
    plain = spec.sliding_window is None  # every row sees all of its keys
    for row, (q_len, kv_len) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
        column, seen = 0, [(0, kv_len)] if q_len and kv_len else []
        if not plain:
            seen = sorted(visible_keys(spec, batch, row))
            column = seen[0][0] // size if seen else 0
            holes += [(row, lo, hi) for lo, hi in _gaps(seen, size)]
        first.append(column)
        lens.append(kv_len - column * size if seen else 0)
        counts.append(-(-lens[-1] // size))
    return Pages(size, tuple(first), tuple(lens), (0, *accumulate(counts)), tuple(holes))


def _gaps(seen: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Half-open runs of pages between the visible ranges, which are in order of their starts."""
    gaps, end = [], 0
    for i, (lo, hi) in enumerate(seen):
        if i and lo // size > end:
            gaps.append((end, lo // size))
        end = max(end, -(-hi // size))
    return gaps


def page_indices(batch: Batch, pages: Pages) -> Tensor:
    """int32 ``[pages.indptr[-1]]`` on the device: page ids (packed: key indices), row after row.

    The number of pages comes from the host, so nothing waits; the ids stay on the device. A page that no token sees is replaced by the
    row's first one: it is masked, but multiplied by 0, and its own memory may hold NaN.
    """
    device, total = batch.seq_lens.device, pages.indptr[-1]
    table = batch.block_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    pitch = 0 if table is None else table.stride(0)
    counts = [b - a for a, b in zip(pages.indptr, pages.indptr[1:], strict=False)]
    shift = [row * pitch + column - start for row, (column, start) in enumerate(zip(pages.first, pages.indptr, strict=False))]
    both = torch.tensor([counts, shift], dtype=torch.int64).to(device, non_blocking=True)
    if pages.holes:
        at = _columns(pages, counts, pitch).to(device, non_blocking=True)
    else:
        at = torch.arange(total, device=device) + torch.repeat_interleave(both[1], both[0], output_size=total)
    if batch.kv_start_loc is not None:
        at = at + torch.repeat_interleave(batch.kv_start_loc[:-1], both[0], output_size=total)
    if table is None:
        return at.to(torch.int32)
    flat = table.as_strided(((table.shape[0] - 1) * pitch + table.shape[1],), (1,)) if table.shape[0] else table.reshape(-1)
    return flat.index_select(0, at)


def _columns(pages: Pages, counts: Sequence[int], pitch: int) -> Tensor:
    """int64 places in the table, holes led to their row's first page. Made on the host: holes are rare, and only rows with spans have them."""
    parts = [row * pitch + column + torch.arange(count) for row, (column, count) in enumerate(zip(pages.first, counts, strict=True))]
    for row, lo, hi in pages.holes:
        parts[row][lo - pages.first[row] : hi - pages.first[row]] = parts[row][0].clone()
    return torch.cat(parts)


def shares_sight(spans: Sequence[Span]) -> bool:
    """Whether two spans of a row belong to one group, so that no single range says what a token sees."""
    groups = [group for _, _, group in spans if group is not None]
    return len(set(groups)) < len(groups)


def token_ranges(batch: Batch, pages: Pages) -> Tensor:
    """int32 ``[tokens, 2]`` on the host: the inclusive range of (cut) keys that each token's span holds, ``(-1, -1)`` for text."""
    ranges, token = torch.full((batch.num_tokens, 2), -1, dtype=torch.int32), 0
    for row, (q_len, kv_len, cut) in enumerate(zip(batch.query_lens, batch.key_lens, pages.cut, strict=True)):
        position = kv_len - q_len  # of the row's first token
        for start, end, _ in batch.spans(row):
            here = slice(token + max(start - position, 0), token + max(end - position, 0))
            ranges[here, 0], ranges[here, 1] = max(start - cut, 0), end - 1 - cut
        token += q_len
    return ranges


def key_families(batch: Batch, pages: Pages) -> tuple[Tensor, Tensor]:
    """Which keys see each other both ways, on the host: int32 ``[keys]`` family of each (cut) key, -1 for text, and int32 ``[rows]`` where
    each row's keys begin there.
    """
    starts = [0, *accumulate(pages.lens)]
    families = torch.full((max(1, starts[-1]),), -1, dtype=torch.int32)
    for row, (start, length, cut) in enumerate(zip(starts, pages.lens, pages.cut, strict=False)):
        numbers: dict[object, int] = {}
        for lo, hi, group in batch.spans(row) if length else ():
            key: object = ("span", lo) if group is None else ("group", group)
            families[start + max(lo - cut, 0) : start + max(hi - cut, 0)] = numbers.setdefault(key, len(numbers))
    return families, torch.tensor(starts[:-1], dtype=torch.int32)
