"""What a Q block, a unit of a step's work, reads: its row, and the tiles that its tokens see. For many units side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.intervals import tile_bounds, token_intervals


@triton.jit
def last_at_most(sorted_ptr, wanted, count, STEP: tl.constexpr):
    """The last of ``count`` ascending numbers, STEP apart, that is at most each of ``wanted [L]``, or 0."""
    low = tl.zeros_like(wanted).to(tl.int32)
    high = low + count
    width = count
    while width > 1:
        middle = (low + high) // 2
        less = tl.load(sorted_ptr + middle * STEP) <= wanted
        open_ = high - low > 1
        low = tl.where(open_ & less, middle, low)
        high = tl.where(open_ & (~less), middle, high)
        width = (width + 1) // 2
    return low


@triton.jit
def unit_facts(
    unit,  # [L]
    real,  # [L] bool
    first_ptr, seqs, query_start_ptr, seq_lens_ptr, prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr, SPANS: tl.constexpr, GROUPS: tl.constexpr,
    RSWA: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """``(row, q_block, q_len, kv_len, visible_tiles)`` of units. A row's last Q block comes first: where it is causal, it reads most."""
    row = last_at_most(first_ptr, unit, seqs, 1)
    q_len = tl.load(query_start_ptr + row + 1, mask=real, other=0) - tl.load(query_start_ptr + row, mask=real, other=0)
    kv_len = tl.load(seq_lens_ptr + row, mask=real, other=0)
    causal = kv_len >= 0
    if CAUSAL == 2:
        causal = tl.load(causal_ptr + row, mask=real, other=0) != 0
    prefix_len = tl.zeros_like(kv_len)
    if RSWA > 0:
        prefix_len = tl.load(prefix_lens_ptr + row, mask=real, other=0)
    spans_at = tl.zeros_like(kv_len)
    spans = tl.zeros_like(kv_len)
    if SPANS > 0:
        spans_at = tl.load(row_span_start_ptr + row, mask=real, other=0)
        spans = tl.load(row_span_start_ptr + row + 1, mask=real, other=0) - spans_at
    q_block = (q_len + BLOCK_Q - 1) // BLOCK_Q - 1 - (unit - tl.load(first_ptr + row, mask=real, other=0))
    first = kv_len - q_len + q_block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, kv_len) - 1
    bounds = visible_tiles(
        first, last, kv_len, causal, prefix_len, spans_at, spans, row_spans_ptr,
        CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, GROUPS, RSWA, BLOCK_N,
    )  # fmt: skip
    return row, q_block, q_len, kv_len, bounds


@triton.jit
def visible_tiles(
    first,  # [L]: positions of the first and the last token
    last,
    kv_len,  # [L]
    causal,  # [L] bool
    prefix_len,  # [L]
    spans_at,  # [L]
    spans,  # [L]
    row_spans_ptr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr, LOOKBACK: tl.constexpr,
    SPANS: tl.constexpr, GROUPS: tl.constexpr, RSWA: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """What a run of tokens reads, each ``[L]``: ``(head_tiles, start_tile, tiles, prefix_max, lo_min, hi_max, full_begin, full_end)``.

    Intervals only move right from token to token, so the first and the last token bound them; spans add theirs. Tiles are counted in
    reading order, ``[0, head_tiles)`` of the row, then from ``start_tile`` on. All tokens see every key of ``[full_begin, full_end)``.
    """
    none = tl.zeros_like(first)
    prefix_min, lo_min, hi_min = token_intervals(
        first, kv_len, none, none, prefix_len, causal, CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, 0, RSWA
    )  # fmt: skip
    prefix_max, lo_max, hi_max = token_intervals(
        last, kv_len, none, none, prefix_len, causal, CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, 0, RSWA
    )  # fmt: skip
    if SPANS > 0:
        for i in range(tl.max(spans, axis=0)):
            start, end, group = load_span(row_spans_ptr, spans_at + i, i < spans, kv_len)
            mine = (start <= last) & (end > first) & (start < end)
            hi_max = tl.where(mine, tl.maximum(hi_max, end), hi_max)
            if SPANS == 1:  # within_window never reaches further left than the window
                lo_min = tl.where(mine, tl.minimum(lo_min, start), lo_min)
            if GROUPS:
                for j in range(tl.max(spans, axis=0)):
                    other_start, other_end, other_group = load_span(row_spans_ptr, spans_at + j, j < spans, kv_len)
                    same = mine & (group >= 0) & (group == other_group) & (other_start < other_end)
                    hi_max = tl.where(same, tl.maximum(hi_max, other_end), hi_max)
                    if SPANS == 1:
                        lo_min = tl.where(same, tl.minimum(lo_min, other_start), lo_min)
    head_tiles, start_tile, tiles = tile_bounds(prefix_max, lo_min, hi_max, BLOCK_N)
    full_begin = tl.maximum((lo_max + BLOCK_N - 1) // BLOCK_N, start_tile) - start_tile + head_tiles
    full_end = hi_min // BLOCK_N - start_tile + head_tiles
    if RSWA > 0:  # the prefix is what is long
        full_begin = tl.zeros_like(tiles)
        full_end = prefix_min // BLOCK_N
    return head_tiles, start_tile, tiles, prefix_max, lo_min, hi_max, full_begin, full_end


@triton.jit
def load_span(row_spans_ptr, span, real, kv_len):
    """``(start, end, group)`` of spans ``[L]``, cut to the row's keys; nothing where not ``real``."""
    start = tl.load(row_spans_ptr + 3 * span, mask=real, other=0)
    end = tl.load(row_spans_ptr + 3 * span + 1, mask=real, other=0)
    return start, tl.minimum(end, kv_len), tl.load(row_spans_ptr + 3 * span + 2, mask=real, other=-1)
