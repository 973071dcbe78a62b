"""Which keys a token sees, as intervals, and which tiles a Q block must read.

One mask form serves every semantic: the token at position ``pos`` sees the keys in ``[0, prefix) or [lo, hi)``, and, when spans
form groups, the other spans of its own group.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_intervals(
    pos,  # [M] int32, position of each row's token
    kv_len,  # keys of the row
    span_start,  # [M] int32, own multimodal span, [0, 0) for none
    span_end,
    prefix_len,  # R-SWA
    row_causal,  # per-sequence causality; ignored unless CAUSAL is 2
    CAUSAL: tl.constexpr,  # 0: no, 1: yes, 2: by row_causal
    WINDOW: tl.constexpr,  # keys seen to the left, itself included; 0: no window
    WINDOW_RIGHT: tl.constexpr,  # keys seen to the right where not causal
    CHUNK: tl.constexpr,  # chunk size; 0: none
    LOOKBACK: tl.constexpr,
    SPANS: tl.constexpr,  # 0: none, 1: override_window, 2: within_window
    RSWA: tl.constexpr,  # window of R-SWA; 0: none
):
    """``(prefix, lo, hi)``, each ``[M]``: the row's token sees ``[0, prefix)`` and ``[lo, hi)``, cut to ``[0, kv_len)``."""
    lo = tl.zeros_like(pos)
    hi = tl.zeros_like(pos) + kv_len
    if WINDOW > 0:
        lo = pos - WINDOW + 1
        hi = pos + tl.minimum(kv_len, WINDOW_RIGHT) + 1  # a reach near 2**31 must not wrap around
    if CAUSAL == 1:
        hi = pos + 1
    if CAUSAL == 2:
        hi = tl.where(row_causal, pos + 1, hi)
    if CHUNK > 0:
        lo = tl.maximum(lo, tl.maximum(tl.maximum(pos, 0) // CHUNK - LOOKBACK, 0) * CHUNK)
    if SPANS == 1:  # the union of two intervals that both hold pos is one interval
        inside = span_end > 0
        lo = tl.where(inside, tl.minimum(lo, span_start), lo)
    if SPANS > 0:
        hi = tl.maximum(hi, span_end)
    prefix = tl.zeros_like(pos)
    if RSWA > 0:
        prefix = tl.minimum(pos + 1, prefix_len)
        lo = pos - RSWA + 1
    hi = tl.minimum(hi, kv_len)
    prefix = tl.minimum(prefix, kv_len)
    return tl.maximum(prefix, 0), tl.maximum(lo, 0), tl.maximum(hi, 0)


@triton.jit
def own_spans(pos, kv_len, row_spans_ptr, num_spans):
    """``(start, end, group)``, each ``[M]``: the span that holds each row's token, ``(0, 0, -1)`` for none."""
    start = tl.zeros_like(pos)
    end = tl.zeros_like(pos)
    group = tl.zeros_like(pos) - 1
    for i in range(num_spans):
        first = tl.load(row_spans_ptr + 3 * i)
        last = tl.load(row_spans_ptr + 3 * i + 1)
        inside = (pos >= first) & (pos < last) & (first < kv_len)
        start = tl.where(inside, first, start)
        end = tl.where(inside, last, end)
        group = tl.where(inside, tl.load(row_spans_ptr + 3 * i + 2), group)
    return start, end, group


@triton.jit
def tile_mask(
    key,  # [N] int32
    prefix,  # [M]
    lo,  # [M]
    hi,  # [M]
    group,  # [M] int32, group of the token's span, -1 for none
    kv_len,
    row_spans_ptr,  # int32 [spans, 3] of this row: start, end, group
    num_spans,
    SPANS: tl.constexpr,
    GROUPS: tl.constexpr,
    RSWA: tl.constexpr,
):
    """``[M, N]`` bool: which keys of the tile each row's token sees."""
    mask = (key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None])
    if RSWA > 0:
        mask = mask | (key[None, :] < prefix[:, None])
    if GROUPS:
        for i in range(num_spans):
            start = tl.load(row_spans_ptr + 3 * i)
            end = tl.minimum(tl.load(row_spans_ptr + 3 * i + 1), kv_len)
            which = tl.load(row_spans_ptr + 3 * i + 2)
            member = (group[:, None] == which) & (group[:, None] >= 0) & (key[None, :] >= start) & (key[None, :] < end)
            if SPANS == 2:
                member = member & (key[None, :] >= lo[:, None])
            mask = mask | member
    return mask


@triton.jit
def tile_bounds(prefix_max, lo_min, hi_max, BLOCK_N: tl.constexpr):
    """``(head, start, count)``: the Q block reads tiles ``[0, head)``, then ``[start, start + count - head)``. The gap is never read."""
    head = (prefix_max + BLOCK_N - 1) // BLOCK_N
    start = tl.maximum(lo_min // BLOCK_N, head)
    end = (hi_max + BLOCK_N - 1) // BLOCK_N
    return head, start, head + tl.maximum(end - start, 0)
