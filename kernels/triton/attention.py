"""The attention kernel: one program runs one work item of one KV head, over pages or packed keys."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmux.kernels.triton.loop import attend_tiles
from attnmux.kernels.triton.plan import ITEM, ITEM_PAGES
from attnmux.kernels.triton.values import LN2, LOG2E, decode_fp8, merge_sink

UNALIGNED = [
    "lse_ptr",
    "table_ptr",
    "prefix_lens_ptr",
    "causal_ptr",
    "sinks_ptr",
    "slopes_ptr",
    "q_scale_ptr",
    "k_scale_ptr",
    "v_scale_ptr",
    "count_ptr",
]
"""Views of any alignment, read element by element: nothing is to be compiled anew for them while serving."""


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=UNALIGNED)
def paged_attention(
    q_ptr,  # [tokens, Hq, D]; fp8 as uint8
    k_ptr,  # pages, or packed keys; fp8 as uint8
    v_ptr,
    k_descriptor,  # of the pages as [pages, Hkv, page, D], or None: read through pointers
    v_descriptor,
    out_ptr,  # [tokens, Hq, DV]
    lse_ptr,  # [tokens, Hq] fp32 or None
    slot_out_ptr,  # fp32 [slots, Hkv, M, V_HEAD_SIZE]
    slot_lse_ptr,  # fp32 [slots, Hkv, M], base 2
    items_ptr,  # as plan_step writes them
    count_ptr,
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
    FOLD: tl.constexpr,  # the scale is positive and nothing comes between it and the softmax
    SCALE_BY_HEAD: tl.constexpr,
    FP8: tl.constexpr,  # the cache's format, as for decode_fp8; 0: not fp8
    FP8_NATIVE: tl.constexpr,  # the target converts that format itself
    Q_FP8: tl.constexpr,  # the queries' format
    DTYPE: tl.constexpr,
    STAGED: tl.constexpr,  # tiles with a mask in loops of their own: for descriptors, which cannot leave keys out, and groups
    PREFETCH: tl.constexpr,  # how many tiles ahead page ids are read
    FIRST: tl.constexpr,  # pages of a tile, if the item holds those of its first two; 0: not
    SWAP: tl.constexpr,  # keys and values take the matrix unit's long side, and few queries the short one
    EARLY: tl.constexpr,  # started while the kernel before may still run, as the next one is
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """One item of one KV head. The grid is ``items * KV_HEADS``, heads fastest, so that heads of a page run together."""
    item = tl.program_id(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    # What plan_step has written is read while the kernel before may still run: whoever launches sees to it that this one is another.
    item_ptr = items_ptr + item.to(tl.int64) * ITEM
    row = tl.load(item_ptr)
    q_block = tl.load(item_ptr + 1)
    begin = tl.load(item_ptr + 2)
    end = tl.load(item_ptr + 3)
    head_tiles = 0
    start_tile = tl.load(item_ptr + 5)
    full_begin = tl.load(item_ptr + 6)
    full_end = tl.load(item_ptr + 7)
    prefix_max = 0
    if RSWA > 0:
        head_tiles = tl.load(item_ptr + 4)
        prefix_max = tl.load(item_ptr + 8)
    lo_min = tl.load(item_ptr + 9)
    hi_max = tl.load(item_ptr + 10)
    first_token = tl.load(item_ptr + 11)
    q_len = tl.load(item_ptr + 12)
    kv_len = tl.load(item_ptr + 13)
    page = row * 0
    next_page = row * 0
    if FIRST > 0:  # [N], or one
        page_ptr = item_ptr + ITEM_PAGES + (0 if FIRST == 1 else tl.arange(0, BLOCK_N) // (BLOCK_N // FIRST))
        page = tl.load(page_ptr)
        next_page = tl.load(page_ptr + FIRST)
    items = tl.load(count_ptr)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # No item has a negative entry. They are asked all the same, since ptxas would otherwise load them only after count_ptr has answered.
    if (item >= items) | ((row | q_block | begin | end | start_tile | hi_max | first_token | q_len | kv_len) < 0):
        return

    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    score_scale = scale
    if q_scale_ptr is not None:
        score_scale = score_scale * tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        score_scale = score_scale * tl.load(k_scale_ptr + kv_head * SCALE_BY_HEAD)
    if not SOFTCAP:
        score_scale = score_scale * LOG2E
    k_head_ptr = k_ptr + kv_head.to(tl.int64) * stride_k_head
    v_head_ptr = v_ptr + kv_head.to(tl.int64) * stride_v_head

    # The Q block: row m is query head m % GROUP of token m // GROUP.
    m = tl.arange(0, BLOCK_M)
    token = q_block * BLOCK_Q + m // GROUP  # [M], in the row
    head = (kv_head * GROUP + m % GROUP).to(tl.int64)
    valid = (token < q_len) & (m < BLOCK_Q * GROUP)
    pos = kv_len - q_len + token
    token_row = (first_token + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    q_mask = valid[:, None] & (d[None, :] < HEAD_SIZE)
    q = tl.load(q_ptr + token_row[:, None] * stride_q_token + (head * stride_q_head)[:, None] + d[None, :], mask=q_mask, other=0)  # [M, D]
    if Q_FP8 > 0:
        q = decode_fp8(q, Q_FP8)
    q = q.to(DTYPE)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if ALIBI > 0:
        slope = tl.load(slopes_ptr + head, mask=valid, other=0.0) * LOG2E

    row_table_ptr = table_ptr
    first_key = kv_len * 0
    if PAGE_SIZE == 0:
        first_key = tl.load(table_ptr + row)
    else:
        row_table_ptr += row.to(tl.int64) * stride_table

    acc = tl.zeros([BLOCK_DV, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N] if SWAP else [BLOCK_M], tl.float32)
    WHOLE_FIRST: tl.constexpr = STAGED and not (WINDOW > 0 or CHUNK > 0)  # without a bound at the left nothing there needs a mask
    for stage in tl.static_range(1 if WHOLE_FIRST else 0, 3 if STAGED else 1):  # tiles with a mask, tiles without, tiles with a mask
        stage_begin = begin if stage == 0 else (full_begin if stage == 1 else full_end)
        stage_end = end if not STAGED or stage == 2 else (full_begin if stage == 0 else full_end)
        acc, top, total = attend_tiles(
            q, acc, top, total, stage_begin, stage_end, full_begin, full_end, head_tiles, start_tile, prefix_max, lo_min, hi_max, pos, slope, row, kv_len,
            prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr, k_head_ptr, v_head_ptr, k_descriptor, v_descriptor, row_table_ptr,
            first_key, kv_head, stride_k_page, stride_k_key, stride_v_page, stride_v_key, page, next_page, score_scale, softcap, stage != 1,
            PREFETCH if stage == 1 or not STAGED else 0, FIRST, SWAP,
            PAGE_SIZE, HEAD_SIZE, V_HEAD_SIZE, CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, GROUPS, RSWA, ALIBI, SOFTCAP, FOLD,
            FP8, FP8_NATIVE, DTYPE, BLOCK_N, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    # The result, or this part's state for combine. Sinks join once: here, or there.
    # Places are read and computed anew, so that they take no registers in between.
    first_row = tl.load(item_ptr + 1) * BLOCK_Q
    valid = (m // GROUP < tl.load(item_ptr + 12) - first_row) & (m < BLOCK_Q * GROUP)
    out_row = (tl.load(item_ptr + 11) + first_row + m // GROUP).to(tl.int64)
    head = kv_head.to(tl.int64) * GROUP + m % GROUP
    dv = tl.arange(0, BLOCK_DV)
    if SWAP:
        acc = tl.trans(acc)
        total = tl.sum(total, axis=1)
    out_mask = valid[:, None] & (dv[None, :] < V_HEAD_SIZE)
    if v_scale_ptr is not None:
        acc = acc * tl.load(v_scale_ptr + kv_head * SCALE_BY_HEAD)
    slot = tl.load(item_ptr + 14)
    if slot < 0:
        if sinks_ptr is not None:
            top, total, correction = merge_sink(top, total, tl.load(sinks_ptr + head, mask=valid, other=0.0))
            acc = acc * correction[:, None]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = out_row[:, None] * stride_out_token + (head * stride_out_head)[:, None] + dv[None, :]
        tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
        if lse_ptr is not None:
            tl.store(lse_ptr + out_row * (KV_HEADS * GROUP) + head, (top + tl.log2(total)) * LN2, mask=valid)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        slot_row = (slot * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + m
        tl.store(slot_out_ptr + slot_row[:, None] * V_HEAD_SIZE + dv[None, :], acc, mask=out_mask)
        tl.store(slot_lse_ptr + slot_row, top + tl.log2(total), mask=valid)
