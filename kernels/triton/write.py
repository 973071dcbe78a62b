"""Writing new keys and values into the cache, quantised when it is fp8."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmux.kernels.triton.values import encode_fp8


@triton.jit
def _write_row(
    new_ptr,  # of the token
    cache_ptr,  # of the slot
    scale_ptr,
    largest,
    stride_new_head,
    stride_head,
    head,  # [H] int64
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SCALE_BY_HEAD: tl.constexpr,
    FP8: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    mask = (head[:, None] < KV_HEADS) & (column[None, :] < SIZE)  # [H, BLOCK]
    value = tl.load(new_ptr + (head * stride_new_head)[:, None] + column[None, :], mask=mask)
    if FP8 > 0:
        value = value.to(tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + head * SCALE_BY_HEAD, mask=head < KV_HEADS, other=1.0)  # [H]
            value = tl.div_rn(value, scale[:, None])  # as torch divides: a quotient beside a tie must not fall on it
        value = encode_fp8(value, largest, FP8)
    tl.store(cache_ptr + (head * stride_head)[:, None] + column[None, :], value, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "k_scale_ptr", "v_scale_ptr"])
def write_cache(
    k_ptr,  # [tokens, Hkv, SIZE]
    v_ptr,  # [tokens, Hkv, V_SIZE]
    k_cache_ptr,  # pages or packed; fp8 as uint8
    v_cache_ptr,
    slots_ptr,  # int64 [tokens]
    k_scale_ptr,  # fp32 [1] or [Hkv] or None
    v_scale_ptr,
    largest,  # of the fp8 format
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_k_cache_page,
    stride_k_cache_key,
    stride_k_cache_head,
    stride_v_cache_page,
    stride_v_cache_key,
    stride_v_cache_head,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    SCALE_BY_HEAD: tl.constexpr,
    FP8: tl.constexpr,  # the cache's format, as for encode_fp8; 0: not fp8
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    EARLY: tl.constexpr,  # started while the kernel before may still run, as the next one is
):
    """BLOCK_H heads of one token a program; a slot of -1 is skipped. Grid: ``(tokens, blocks of heads)``."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    head = tl.program_id(1).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)  # [H]
    if PAGE_SIZE == 0:
        k_at = slot * stride_k_cache_key
        v_at = slot * stride_v_cache_key
    else:
        k_at = (slot // PAGE_SIZE) * stride_k_cache_page + (slot % PAGE_SIZE) * stride_k_cache_key
        v_at = (slot // PAGE_SIZE) * stride_v_cache_page + (slot % PAGE_SIZE) * stride_v_cache_key
    _write_row(
        k_ptr + token * stride_k_token, k_cache_ptr + k_at, k_scale_ptr, largest, stride_k_head, stride_k_cache_head, head,
        KV_HEADS, SIZE, SCALE_BY_HEAD, FP8, BLOCK_D,
    )  # fmt: skip
    _write_row(
        v_ptr + token * stride_v_token, v_cache_ptr + v_at, v_scale_ptr, largest, stride_v_head, stride_v_cache_head, head,
        KV_HEADS, V_SIZE, SCALE_BY_HEAD, FP8, BLOCK_DV,
    )  # fmt: skip
