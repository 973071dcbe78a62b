"""Where the keys of a case lie: pages, pools full of NaN, and the batch that points at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.query import Lengths
from attnmux.dispatch.rows import visible_keys
from attnmux.dispatch.spec import COMPUTE_DTYPES, FP8_DTYPES, AttentionSpec
from attnmux.testing.rows import Row

SPARE_PAGES = 5
UPPER_BOUND_SLACK = 7

Place = Literal["shuffled", "low", "high"]


def place_rows(spec: AttentionSpec, rows: Sequence[Row], place: Place, seed: int) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Pages of each row (packed: its first key), and how many pages (packed: keys) the pool holds."""
    if spec.page_size is None:
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row.kv_len + 2)
        return tuple((start,) for start in starts[:-1]), starts[-1]
    counts = [-(-row.kv_len // spec.page_size) for row in rows]
    held = sum(counts) + SPARE_PAGES
    order = torch.randperm(held, generator=torch.Generator().manual_seed(seed)).tolist()
    if place != "shuffled":
        held = 2 * held + 64
        order = list(range(held)) if place == "low" else list(range(held))[::-1]
    pages = iter(order)
    return tuple(tuple(next(pages) for _ in range(count)) for count in counts), held


def make_pools(spec: AttentionSpec, held: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Pools full of NaN, with one more page of NaN before the first."""
    shapes = []
    for size in (spec.head_size, spec.v_head_size):
        page = (spec.num_kv_heads, size) if spec.page_size is None else (spec.page_size, spec.num_kv_heads, size)
        shapes.append((page[1], page[0], *page[2:]) if spec.kv_layout == "HND" else page)
    if shapes[0] == shapes[1]:
        both = _nan((held + 1, 2, *shapes[0]), spec.kv_dtype, device)
        return both[1:, 0], both[1:, 1]
    k_cache, v_cache = (_nan((held + 1, *shape), spec.kv_dtype, device)[1:] for shape in shapes)
    return k_cache, v_cache


def _nan(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if dtype in COMPUTE_DTYPES:
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
    code = int(torch.tensor([torch.nan]).to(dtype).view(torch.uint8))
    return torch.full(tuple(shape), code, dtype=torch.uint8, device=device).view(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """An fp8 tensor as bytes, others as they are: many operators lack fp8, and bytes move the same."""
    return tensor.view(torch.uint8) if tensor.dtype in FP8_DTYPES else tensor


def make_batch(
    spec: AttentionSpec, rows: Sequence[Row], places: Sequence[Sequence[int]], device: torch.device | str, lengths: Lengths, hide: bool = True
) -> Batch:
    """The rows as an engine passes them; with ``hide``, entries of pages that nobody may see are -1."""

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.q_len)
    slack = UPPER_BOUND_SLACK if lengths == "upper_bound" else 0
    batch = Batch(
        ints(starts),
        ints([row.kv_len for row in rows]),
        causal=torch.tensor([row.causal for row in rows], dtype=torch.bool, device=device) if spec.causal == "per_sequence" else None,
        prefix_lens=ints([row.prefix_len for row in rows]) if spec.rswa_window is not None else None,
        query_lens_cpu=[row.q_len for row in rows],
        seq_lens_cpu=[row.kv_len + slack if row.kv_len else 0 for row in rows],
        mm_spans=[list(row.spans) for row in rows] if spec.mm_prefix else None,
        lengths=lengths,
    )
    if spec.page_size is None:
        batch.kv_start_loc = ints([*(place[0] for place in places), (places[-1][0] + rows[-1].kv_len) if rows else 0])
        return batch
    table = _table(spec, rows, places, slack, hide)
    batch.block_table = ints(table).reshape(len(rows), len(table[0]) if table else 0)
    return batch


def _table(spec: AttentionSpec, rows: Sequence[Row], places: Sequence[Sequence[int]], slack: int, hide: bool) -> list[list[int]]:
    page_size = spec.page_size or 1
    columns = max((len(place) for place in places), default=0) + 1 + -(-slack // page_size)
    exact = Batch(
        torch.empty(0),
        torch.empty(len(rows)),
        query_lens_cpu=[row.q_len for row in rows],
        seq_lens_cpu=[row.kv_len for row in rows],
        mm_spans=[row.spans for row in rows] if spec.mm_prefix else None,
    )
    table = []
    for i, place in enumerate(places):
        ranges = [(lo, hi) for lo, hi in visible_keys(spec, exact, i, rows[i].prefix_len) if lo < hi]
        seen = {page for lo, hi in ranges for page in range(lo // page_size, -(-hi // page_size))}
        kept = [page if column in seen or not hide else -1 for column, page in enumerate(place)]
        table.append(kept + [-1] * (columns - len(place)))
    return table
