"""Merging partial states: of the parts of a Q block, and of ``merge_states``. In index order, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.values import LN2, LOG2E, merge_sink, merge_step


@triton.jit(do_not_specialize_on_alignment=["query_start_ptr", "lse_ptr", "sinks_ptr"])
def combine(
    slot_out_ptr,  # fp32 [slots, Hkv, M, V_HEAD_SIZE]
    slot_lse_ptr,  # fp32 [slots, Hkv, M], base 2
    merges_ptr,  # int32 [merges, 4]: row (-1: none), Q block, first slot, parts
    query_start_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    stride_out_token,
    stride_out_head,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows of the Q block a program merges
    BLOCK_DV: tl.constexpr,
):
    """Merge the parts of one Q block of one KV head, BLOCK_R of its rows a program. Grid: ``(merges * KV_HEADS, BLOCK_M / BLOCK_R)``."""
    merge_ptr = merges_ptr + (tl.program_id(0) // KV_HEADS) * 4
    kv_head = tl.program_id(0) % KV_HEADS
    row = tl.load(merge_ptr)
    if row < 0:
        return
    q_block = tl.load(merge_ptr + 1)
    first_slot = tl.load(merge_ptr + 2)
    parts = tl.load(merge_ptr + 3)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    first_token = tl.load(query_start_ptr + row)
    q_len = tl.load(query_start_ptr + row + 1) - first_token
    m = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)  # [R]
    token = q_block * BLOCK_Q + m // GROUP
    head = (kv_head * GROUP + m % GROUP).to(tl.int64)
    valid = (token < q_len) & (m < BLOCK_Q * GROUP)
    if tl.max(valid.to(tl.int32), axis=0) == 0:
        return
    dv = tl.arange(0, BLOCK_DV)
    mask = valid[:, None] & (dv[None, :] < V_HEAD_SIZE)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for part in range(parts):
        slot_row = ((first_slot + part) * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + m
        lse = tl.load(slot_lse_ptr + slot_row, mask=valid, other=float("-inf"))
        state = tl.load(slot_out_ptr + slot_row[:, None] * V_HEAD_SIZE + dv[None, :], mask=mask, other=0.0)
        acc, top, total = merge_step(acc, top, total, state, lse)
    if sinks_ptr is not None:
        acc, top, total = merge_sink(acc, top, total, sinks_ptr, head, valid)
    token_row = (first_token + token).to(tl.int64)
    out_at = token_row[:, None] * stride_out_token + (head * stride_out_head)[:, None] + dv[None, :]
    merged = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + out_at, merged.to(out_ptr.dtype.element_ty), mask=mask)
    if lse_ptr is not None:
        tl.store(lse_ptr + token_row * (KV_HEADS * GROUP) + head, (top + tl.log2(total)) * LN2, mask=valid)


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
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """``merge_states``: BLOCK_R rows a program."""
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    valid = r < rows
    dv = tl.arange(0, BLOCK_DV)
    mask = valid[:, None] & (dv[None, :] < V_HEAD_SIZE)
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    for i in range(states):
        at = r + i * tl.cast(rows, tl.int64)
        lse = tl.load(lses_ptr + at, mask=valid, other=float("-inf")) * LOG2E
        state = tl.load(outs_ptr + at[:, None] * V_HEAD_SIZE + dv[None, :], mask=mask, other=0.0).to(tl.float32)
        acc, top, total = merge_step(acc, top, total, state, lse)
    if sinks_ptr is not None:
        acc, top, total = merge_sink(acc, top, total, sinks_ptr, r % HEADS, valid)
    merged = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + r[:, None] * V_HEAD_SIZE + dv[None, :], merged.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + r, (top + tl.log2(total)) * LN2, mask=valid)
