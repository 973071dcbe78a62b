"""Writing new keys and values into the cache, quantised when it is fp8."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.values import encode_fp8


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "scale_ptr"])
def write_cache(
    new_ptr,  # [tokens, Hkv, SIZE]
    cache_ptr,  # pages or packed; fp8 as uint8
    slots_ptr,  # int64 [tokens]
    scale_ptr,  # fp32 [1] or [Hkv] or None
    largest,  # of the fp8 format
    stride_new_token,
    stride_new_head,
    stride_page,
    stride_key,
    stride_head,
    SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    SCALE_BY_HEAD: tl.constexpr,
    FP8: tl.constexpr,  # the cache's format, as for encode_fp8; 0: not fp8
    BLOCK: tl.constexpr,
):
    """One head of one token a program; a slot of -1 is skipped. Grid: ``(tokens, Hkv)``."""
    slot = tl.load(slots_ptr + tl.program_id(0))
    if slot < 0:
        return
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < SIZE
    value = tl.load(new_ptr + tl.program_id(0).to(tl.int64) * stride_new_token + head * stride_new_head + column, mask=mask)
    if PAGE_SIZE == 0:
        at = slot * stride_key
    else:
        at = (slot // PAGE_SIZE) * stride_page + (slot % PAGE_SIZE) * stride_key
    at += head * stride_head
    if FP8 > 0:
        value = value.to(tl.float32)
        if scale_ptr is not None:
            value = tl.div_rn(value, tl.load(scale_ptr + head * SCALE_BY_HEAD))  # as torch divides: a quotient beside a tie must not fall on it
        value = encode_fp8(value, largest, FP8)
    tl.store(cache_ptr + at + column, value, mask=mask)
