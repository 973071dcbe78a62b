"""The attention kernel: one program runs one work item of one KV head, over pages or packed keys."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.intervals import NEVER, group_bounds, own_spans, part_of, tile_bounds, tile_mask, token_intervals
from attnmux.kernels.triton.values import LN2, LOG2E, alibi_bias, decode_fp8, merge_sink, soft_cap, softmax_step

UNALIGNED = ["lse_ptr", "query_start_ptr", "seq_lens_ptr", "table_ptr", "prefix_lens_ptr", "causal_ptr", "sinks_ptr", "slopes_ptr"]
"""Views by the caller of any alignment, read element by element: nothing is to be compiled anew for them while serving."""


@triton.jit
def _load_tile(
    base_ptr,  # of this KV head
    page,  # [N] or scalar: page of each key (packed: the row's first key)
    offset,  # [N]: place in the page (packed: in the row)
    stride_page,
    stride_key,
    seen,  # [N] bool: keys that may be read
    column,  # [D]
    SIZE: tl.constexpr,  # head size
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,  # the cache's format, as for decode_fp8; 0: not fp8
    FP8_NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``[N, BLOCK]`` keys or values in the compute dtype; what may not be read comes as 0."""
    row = page.to(tl.int64) * stride_page + offset.to(tl.int64) * stride_key  # [N]
    pointers = base_ptr + row[:, None] + column[None, :]
    if SIZE == BLOCK:
        raw = tl.load(pointers, mask=seen[:, None], other=0)
    else:
        raw = tl.load(pointers, mask=seen[:, None] & (column[None, :] < SIZE), other=0)
    if FP8 == 0:
        values = raw
    elif not FP8_NATIVE:
        values = decode_fp8(raw, FP8).to(DTYPE)
    elif FP8 == 3:
        values = raw.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        values = raw.to(tl.float8e5, bitcast=True).to(DTYPE)
    return values


@triton.jit
def _attend(
    q,  # [M, D]
    acc,  # [M, DV] fp32
    top,  # [M] fp32
    total,  # [M] fp32
    begin,  # tiles of this item, in reading order
    end,
    head_tiles,
    start_tile,
    prefix,  # [M]
    lo,  # [M]
    hi,  # [M]
    prefix_max,
    lo_min,
    hi_max,
    pos,  # [M]
    group,  # [M]
    slope,  # [M], base 2
    kv_len,
    row_spans_ptr,
    num_spans,
    k_ptr,
    v_ptr,
    row_table_ptr,  # block table of the row
    first_key,  # packed keys: the row's first
    stride_k_page,
    stride_k_key,
    stride_v_page,
    stride_v_key,
    score_scale,
    softcap,
    MASKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    SPANS: tl.constexpr,
    GROUPS: tl.constexpr,
    RSWA: tl.constexpr,
    ALIBI: tl.constexpr,
    SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """The online softmax over tiles ``[begin, end)``. Without ``MASKED`` every token sees every key of them."""
    for i in range(begin, end):
        tile = tl.where(i < head_tiles, i, start_tile + i - head_tiles)
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        if MASKED:
            mask = tile_mask(key, prefix, lo, hi, group, kv_len, row_spans_ptr, num_spans, SPANS, GROUPS, RSWA)  # [M, N]
            if GROUPS:  # groups leave gaps between the bounds
                seen = tl.max(mask.to(tl.int32), axis=0) > 0
            else:
                seen = ((key >= lo_min) & (key < hi_max)) | (key < prefix_max)
        else:
            seen = key >= 0
        if PAGE_SIZE == 0:
            page = first_key
            offset = key
        elif PAGE_SIZE % BLOCK_N == 0:
            page = tl.load(row_table_ptr + tile * BLOCK_N // PAGE_SIZE)
            offset = key % PAGE_SIZE
        else:
            page = tl.load(row_table_ptr + key // PAGE_SIZE, mask=seen, other=0)
            offset = key % PAGE_SIZE
        column = tl.arange(0, BLOCK_D)
        k = _load_tile(k_ptr, page, offset, stride_k_page, stride_k_key, seen, column, HEAD_SIZE, BLOCK_D, FP8, FP8_NATIVE, DTYPE)  # [N, D]
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scale  # [M, N]
        if SOFTCAP:
            score = soft_cap(score, softcap, q.dtype == tl.float32) * LOG2E
        if ALIBI > 0:
            score += alibi_bias(slope, pos, key, ALIBI == 2)
        if MASKED:
            score = tl.where(mask, score, float("-inf"))
        weights, top, total, correction = softmax_step(score, top, total)
        column = tl.arange(0, BLOCK_DV)
        v = _load_tile(v_ptr, page, offset, stride_v_page, stride_v_key, seen, column, V_HEAD_SIZE, BLOCK_DV, FP8, FP8_NATIVE, DTYPE)  # [N, DV]
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
    return acc, top, total


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=UNALIGNED)
def paged_attention(
    q_ptr,  # [tokens, Hq, D]; fp8 as uint8
    k_ptr,  # pages, or packed keys; fp8 as uint8
    v_ptr,
    out_ptr,  # [tokens, Hq, DV]
    lse_ptr,  # [tokens, Hq] fp32 or None
    slot_out_ptr,  # fp32 [slots, Hkv, M, V_HEAD_SIZE]
    slot_lse_ptr,  # fp32 [slots, Hkv, M], base 2
    items_ptr,  # int32 [items, 5]: row (-1: none), Q block, part, parts, slot
    query_start_ptr,  # int32 [seqs + 1]
    seq_lens_ptr,  # int32 [seqs]
    table_ptr,  # int32 block table [seqs, columns], or kv_start_loc when packed
    prefix_lens_ptr,  # int32 [seqs] or None
    causal_ptr,  # bool as uint8 [seqs] or None
    row_span_start_ptr,  # int32 [seqs + 1] into row_spans, or None
    row_spans_ptr,  # int32 [spans, 3]
    sinks_ptr,  # [Hq] or None
    slopes_ptr,  # fp32 [Hq] or None
    q_scale_ptr,  # fp32 [1] or None
    k_scale_ptr,  # fp32 [1] or [Hkv] or None
    v_scale_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_key,
    stride_k_head,
    stride_v_page,
    stride_v_key,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_table,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOKBACK: tl.constexpr,
    SPANS: tl.constexpr,
    GROUPS: tl.constexpr,
    RSWA: tl.constexpr,
    ALIBI: tl.constexpr,  # 1: linear, 2: sqrt
    SOFTCAP: tl.constexpr,
    SCALE_BY_HEAD: tl.constexpr,
    FP8: tl.constexpr,  # the cache's format, as for decode_fp8; 0: not fp8
    FP8_NATIVE: tl.constexpr,  # the target converts that format itself
    Q_FP8: tl.constexpr,  # the queries' format
    DTYPE: tl.constexpr,
    CUT_TILES: tl.constexpr,
    STAGED: tl.constexpr,  # also a loop without masks, for the tiles that every token sees whole
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One work item of one KV head. The grid is ``items * KV_HEADS``, heads fastest, so that heads of a page run together."""
    item_ptr = items_ptr + (tl.program_id(0) // KV_HEADS) * 5
    kv_head = tl.program_id(0) % KV_HEADS
    row = tl.load(item_ptr)
    if row < 0:
        return
    q_block = tl.load(item_ptr + 1)
    part = tl.load(item_ptr + 2)
    parts = tl.load(item_ptr + 3)
    slot = tl.load(item_ptr + 4)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP

    # The Q block: row m is query head m % GROUP of token m // GROUP.
    first_token = tl.load(query_start_ptr + row)
    q_len = tl.load(query_start_ptr + row + 1) - first_token
    kv_len = tl.load(seq_lens_ptr + row)
    m = tl.arange(0, BLOCK_M)
    token = q_block * BLOCK_Q + m // GROUP  # [M], in the row
    head = (kv_head * GROUP + m % GROUP).to(tl.int64)
    valid = (token < q_len) & (m < BLOCK_Q * GROUP)
    pos = kv_len - q_len + token
    token_row = (first_token + token).to(tl.int64)

    # What its tokens see.
    span_start = tl.zeros_like(pos)
    span_end = tl.zeros_like(pos)
    group = tl.zeros_like(pos) - 1
    num_spans = kv_len * 0
    if SPANS > 0:
        spans_at = tl.load(row_span_start_ptr + row)
        num_spans = tl.load(row_span_start_ptr + row + 1) - spans_at
        row_spans_ptr += spans_at * 3
        span_start, span_end, group = own_spans(pos, kv_len, row_spans_ptr, num_spans)
    prefix_len = kv_len * 0
    if RSWA > 0:
        prefix_len = tl.load(prefix_lens_ptr + row)
    row_causal = kv_len >= 0
    if CAUSAL == 2:
        row_causal = tl.load(causal_ptr + row) != 0
    prefix, lo, hi = token_intervals(
        pos, kv_len, span_start, span_end, prefix_len, row_causal, CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, RSWA
    )
    prefix_max = tl.max(tl.where(valid, prefix, 0), axis=0)
    lo_min = tl.min(tl.where(valid, lo, NEVER), axis=0)
    lo_max = tl.max(tl.where(valid, lo, 0), axis=0)
    hi_min = tl.min(tl.where(valid, hi, NEVER), axis=0)
    hi_max = tl.max(tl.where(valid, hi, 0), axis=0)
    if GROUPS:
        lo_all, hi_max = group_bounds(tl.where(valid, group, -1), lo_min, hi_max, kv_len, row_spans_ptr, num_spans)
        if SPANS == 1:  # within_window never reaches further left than the window
            lo_min = lo_all

    # Its tiles, this item's part of them, and the stretch that needs no mask.
    head_tiles, start_tile, count = tile_bounds(prefix_max, lo_min, hi_max, BLOCK_N)
    begin, end = part_of(count, part, parts, CUT_TILES)
    full_begin = tl.maximum((lo_max + BLOCK_N - 1) // BLOCK_N, start_tile) - start_tile + head_tiles
    full_end = hi_min // BLOCK_N - start_tile + head_tiles
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)

    d = tl.arange(0, BLOCK_D)
    q_mask = valid[:, None] & (d[None, :] < HEAD_SIZE)
    q = tl.load(q_ptr + token_row[:, None] * stride_q_token + (head * stride_q_head)[:, None] + d[None, :], mask=q_mask, other=0)  # [M, D]
    if Q_FP8 > 0:
        q = decode_fp8(q, Q_FP8)
    q = q.to(DTYPE)
    score_scale = scale
    if q_scale_ptr is not None:
        score_scale = score_scale * tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        score_scale = score_scale * tl.load(k_scale_ptr + kv_head * SCALE_BY_HEAD)
    if not SOFTCAP:
        score_scale = score_scale * LOG2E
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI > 0:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0) * LOG2E
    row_table_ptr = table_ptr
    first_key = kv_len * 0
    if PAGE_SIZE == 0:
        first_key = tl.load(table_ptr + row)
    else:
        row_table_ptr += row.to(tl.int64) * stride_table
    k_head_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for stage in tl.static_range(3 if STAGED else 1):  # tiles with a mask, tiles without, tiles with a mask
        stage_begin = begin if stage == 0 else (full_begin if stage == 1 else full_end)
        stage_end = end if not STAGED or stage == 2 else (full_begin if stage == 0 else full_end)
        acc, top, total = _attend(
            q, acc, top, total, stage_begin, stage_end, head_tiles, start_tile, prefix, lo, hi, prefix_max, lo_min, hi_max, pos, group, slope, kv_len,
            row_spans_ptr, num_spans, k_head_ptr, v_head_ptr, row_table_ptr, first_key, stride_k_page, stride_k_key, stride_v_page, stride_v_key,
            score_scale, softcap, stage != 1, PAGE_SIZE, HEAD_SIZE, V_HEAD_SIZE, SPANS, GROUPS, RSWA, ALIBI, SOFTCAP, FP8, FP8_NATIVE,
            DTYPE, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    # The result, or this part's state for combine. Sinks join once: here, or there.
    dv = tl.arange(0, BLOCK_DV)
    out_mask = valid[:, None] & (dv[None, :] < V_HEAD_SIZE)
    if v_scale_ptr is not None:
        acc = acc * tl.load(v_scale_ptr + kv_head * SCALE_BY_HEAD)
    if slot < 0:
        if sinks_ptr is not None:
            acc, top, total = merge_sink(acc, top, total, sinks_ptr, head, valid)
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = token_row[:, None] * stride_out_token + (head * stride_out_head)[:, None] + dv[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + token_row * (KV_HEADS * GROUP) + head, (top + tl.log2(total)) * LN2, mask=valid)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        slot_row = (slot * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + m
        tl.store(slot_out_ptr + slot_row[:, None] * V_HEAD_SIZE + dv[None, :], acc, mask=out_mask)
        tl.store(slot_lse_ptr + slot_row, top + tl.log2(total), mask=valid)
