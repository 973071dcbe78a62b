"""Merging partial states: parts of split keys, and whole states for ``merge_states``. In index order, so that bits repeat."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmux.kernels.triton.plan import ITEM
from attnmux.kernels.triton.values import LN2, LOG2E, merge_sink, merge_step


@triton.jit(do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr", "merges_ptr", "count_ptr"])
def combine(
    slot_out_ptr,  # fp32 [slots, Hkv, M, V_HEAD_SIZE]
    slot_lse_ptr,  # fp32 [slots, Hkv, M], base 2
    items_ptr,  # as plan_step writes them
    count_ptr,
    merges_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    stride_out_token,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNKS: tl.constexpr,  # of a Q block
    ROWS: tl.constexpr,  # of a chunk
    BLOCK_P: tl.constexpr,  # parts merged side by side
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,  # started while the attention kernel may still run
):
    """Each program takes every so many-th chunk of the Q blocks in several parts. The grid is as large as pays: most steps merge few."""
    merges = tl.load(count_ptr + 1)
    chunk = tl.program_id(0)
    chunks = merges * (KV_HEADS * CHUNKS)
    if EARLY:
        gdc_launch_dependents()
    # Before the wait, so that it does not wait for these: plan_step has ended when the attention kernel runs.
    kv_head, first_m, q_block, row_start, q_len, first_slot, parts = _chunk(chunk, merges, items_ptr, merges_ptr, KV_HEADS, CHUNKS, ROWS)
    if EARLY:
        if (chunk == 0) | (chunk < chunks):  # one does in any case: what comes after this kernel counts on the one before
            gdc_wait()
    dv = tl.arange(0, BLOCK_DV)
    while chunk < chunks:
        for i in range(ROWS):
            m = first_m + i
            token = q_block * (BLOCK_M // GROUP) + m // GROUP
            if (token < q_len) & (m < BLOCK_M // GROUP * GROUP):
                acc = tl.zeros([BLOCK_DV], tl.float32)
                top = tl.cast(float("-inf"), tl.float32)
                total = tl.cast(0.0, tl.float32)
                for at in tl.range(0, parts, BLOCK_P, loop_unroll_factor=2):  # two loads on their way
                    part = at + tl.arange(0, BLOCK_P)  # [P]
                    slot_row = ((first_slot + part) * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + m
                    lses = tl.load(slot_lse_ptr + slot_row, mask=part < parts, other=float("-inf"))
                    mask = (part < parts)[:, None] & (dv[None, :] < V_HEAD_SIZE)
                    states = tl.load(slot_out_ptr + slot_row[:, None] * V_HEAD_SIZE + dv[None, :], mask=mask, other=0.0)  # [P, DV]
                    acc, top, total = merge_step(acc, top, total, states, lses)
                head = (kv_head * GROUP + m % GROUP).to(tl.int64)
                token_row = (row_start + token).to(tl.int64)
                row_out_ptr = out_ptr + token_row * stride_out_token + head * stride_out_head
                _finish(acc, top, total, sinks_ptr, head, row_out_ptr, V_HEAD_SIZE, BLOCK_DV, lse_ptr, token_row * (KV_HEADS * GROUP) + head)
        chunk += tl.num_programs(0)
        kv_head, first_m, q_block, row_start, q_len, first_slot, parts = _chunk(chunk, merges, items_ptr, merges_ptr, KV_HEADS, CHUNKS, ROWS)


@triton.jit
def _chunk(chunk, merges, items_ptr, merges_ptr, KV_HEADS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """``(kv_head, first row, Q block, first token of the row, its query tokens, first slot, parts)`` of the chunk, zeros beyond the last.

    Chunks of the same rows of all Q blocks lie together, since the last rows are often not there.
    """
    pairs = tl.maximum(merges * KV_HEADS, 1)
    real = chunk < merges * (KV_HEADS * CHUNKS)
    pair = chunk % pairs
    item = tl.load(merges_ptr + pair // KV_HEADS, mask=real, other=0)
    item_ptr = items_ptr + item.to(tl.int64) * ITEM
    q_block = tl.load(item_ptr + 1, mask=real, other=0)
    row_start = tl.load(item_ptr + 11, mask=real, other=0)
    q_len = tl.load(item_ptr + 12, mask=real, other=0)
    first_slot = tl.load(item_ptr + 14, mask=real, other=0)
    parts = tl.load(item_ptr + 15, mask=real, other=0)
    return pair % KV_HEADS, chunk // pairs * ROWS, q_block, row_start, q_len, first_slot, parts


@triton.jit(do_not_specialize=["states", "rows"])
def merge(
    outs_ptr,  # [states, rows, DV]; rows are tokens times heads
    lses_ptr,  # fp32 [states, rows], natural log
    sinks_ptr,  # [heads] or None
    out_ptr,  # [rows, DV]
    lse_ptr,  # fp32 [rows]
    states,
    rows,
    HEADS: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """``merge_states``: one row a program."""
    r = tl.program_id(0).to(tl.int64)
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    top = tl.cast(float("-inf"), tl.float32)
    total = tl.cast(0.0, tl.float32)
    for at in range(0, states, BLOCK_P):
        state = at + tl.arange(0, BLOCK_P)  # [P]
        place = r + state * tl.cast(rows, tl.int64)
        lses = tl.load(lses_ptr + place, mask=state < states, other=float("-inf")) * LOG2E
        mask = (state < states)[:, None] & (dv[None, :] < V_HEAD_SIZE)
        found = tl.load(outs_ptr + place[:, None] * V_HEAD_SIZE + dv[None, :], mask=mask, other=0.0).to(tl.float32)  # [P, DV]
        acc, top, total = merge_step(acc, top, total, found, lses)
    _finish(acc, top, total, sinks_ptr, r % HEADS, out_ptr + r * V_HEAD_SIZE, V_HEAD_SIZE, BLOCK_DV, lse_ptr, r)


@triton.jit
def _finish(acc, top, total, sinks_ptr, head, row_out_ptr, V_HEAD_SIZE: tl.constexpr, BLOCK_DV: tl.constexpr, lse_ptr, lse_at):
    """Add the sink and store one row."""
    if sinks_ptr is not None:
        top, total, correction = merge_sink(top, total, tl.load(sinks_ptr + head))
        acc = acc * correction
    dv = tl.arange(0, BLOCK_DV)
    merged = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(row_out_ptr + dv, merged.to(row_out_ptr.dtype.element_ty), mask=dv < V_HEAD_SIZE)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_at, (top + tl.log2(total)) * LN2)
