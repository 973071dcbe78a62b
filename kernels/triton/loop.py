"""The loop over tiles of keys: pages, scores, weights, sums."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.intervals import own_spans, tile_mask, token_intervals
from attnmux.kernels.triton.tiles import in_sight, load_tile, tile_of, tile_pages
from attnmux.kernels.triton.values import LOG2E, alibi_bias, soft_cap, softmax_step


@triton.jit
def scaled(acc, correction, SWAP: tl.constexpr):
    """The accumulator in terms of the new top."""
    return acc * (correction[None, :] if SWAP else correction[:, None])


@triton.jit
def add_up(total, correction, weights, SWAP: tl.constexpr):
    """Sums of weights. With ``SWAP`` keys lie across warps: they add up once, at the end."""
    if SWAP:
        total = total * correction[:, None] + weights
    else:
        total = total * correction + tl.sum(weights, axis=1)
    return total


@triton.jit
def attend_tiles(
    q,  # [M, D]
    acc,  # [M, DV] fp32; [DV, M] with SWAP
    top,  # [M] fp32
    total,  # [M] fp32; [M, N] with SWAP
    begin,  # tiles to read, in reading order
    end,
    full_begin,  # those that every token sees whole
    full_end, head_tiles, start_tile, prefix_max, lo_min, hi_max,
    pos,  # [M]
    slope,  # [M], base 2
    row, kv_len, prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor,
    row_table_ptr,  # block table of the row
    first_key,  # packed keys: the row's first
    kv_head, stride_k_page, stride_k_key, stride_v_page, stride_v_key,
    page,  # of the first two tiles, with FIRST
    next_page,
    scale,  # of scores, base 2 unless SOFTCAP; positive with FOLD
    softcap, MASKED: tl.constexpr, PREFETCH: tl.constexpr, FIRST: tl.constexpr, SWAP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr,
    V_HEAD_SIZE: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WINDOW_RIGHT: tl.constexpr, CHUNK: tl.constexpr,
    LOOKBACK: tl.constexpr, SPANS: tl.constexpr, GROUPS: tl.constexpr, RSWA: tl.constexpr, ALIBI: tl.constexpr, SOFTCAP: tl.constexpr,
    FOLD: tl.constexpr, FP8: tl.constexpr, FP8_NATIVE: tl.constexpr, DTYPE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The online softmax over tiles ``[begin, end)``. Without ``MASKED`` every token sees every key of them."""
    LEFT: tl.constexpr = WINDOW > 0 or CHUNK > 0 or RSWA > 0
    UNITS: tl.constexpr = q.dtype != tl.float32
    if MASKED:  # what the tokens see; here, so that it takes no registers in the loop without masks
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
    if FIRST == 0:
        page = tile_pages(
            row_table_ptr, begin, end, head_tiles, start_tile, prefix_max, lo_min, hi_max, MASKED, LEFT, RSWA, PAGE_SIZE, BLOCK_N
        )  # fmt: skip
    if FIRST == 0 and PREFETCH == 2:
        next_page = tile_pages(
            row_table_ptr, begin + 1, end, head_tiles, start_tile, prefix_max, lo_min, hi_max, MASKED, LEFT, RSWA, PAGE_SIZE, BLOCK_N
        )  # fmt: skip
    for i in range(begin, end):
        tile = tile_of(i, head_tiles, start_tile)
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [N]
        seen = key >= 0
        if MASKED:
            seen = in_sight(key, 1, prefix_max, lo_min, hi_max, LEFT, RSWA)
            if GROUPS:  # they leave gaps between the bounds; beyond those only rows that fill up the tile see anything
                mask = tile_mask(key, prefix, lo, hi, group, kv_len, row_spans_ptr, num_spans, SPANS, GROUPS, RSWA)  # [M, N]
                seen = seen & (tl.max(mask.to(tl.int32), axis=0) > 0)
        # A load that waits for another one in the same round would halve the pipeline.
        if PREFETCH == 0:
            page = tile_pages(row_table_ptr, i, end, head_tiles, start_tile, prefix_max, lo_min, hi_max, MASKED, LEFT, RSWA, PAGE_SIZE, BLOCK_N)
        elif PREFETCH == 1:
            page_ahead = tile_pages(
                row_table_ptr, i + 1, end, head_tiles, start_tile, prefix_max, lo_min, hi_max, MASKED, LEFT, RSWA, PAGE_SIZE, BLOCK_N
            )  # fmt: skip
        k = load_tile(
            k_ptr, k_descriptor, page, tile, first_key, kv_head, stride_k_page, stride_k_key, seen,
            PAGE_SIZE, HEAD_SIZE, BLOCK_N, BLOCK_D, MASKED, False, FP8, FP8_NATIVE, DTYPE,
        )  # fmt: skip  # [N, D]
        if SWAP:
            score = tl.trans(tl.dot(k, tl.trans(q), input_precision="ieee"))  # [M, N]
        else:
            score = tl.dot(q, tl.trans(k), input_precision="ieee")  # [M, N]
        factor = scale
        if not FOLD:
            score = score * scale
            factor = 1.0
        if SOFTCAP:
            score = soft_cap(score, softcap, q.dtype == tl.float32) * LOG2E
        if ALIBI > 0:
            score += alibi_bias(slope, pos, key, ALIBI == 2)
        if MASKED and GROUPS:
            score = tl.where(mask, score, float("-inf"))
        elif MASKED:
            if (i < full_begin) | (i >= full_end):
                mask = tile_mask(key, prefix, lo, hi, group, kv_len, row_spans_ptr, num_spans, SPANS, GROUPS, RSWA)  # [M, N]
                score = tl.where(mask, score, float("-inf"))
        # In the order of need, where there are matrix units for the dtype: the accumulator is multiplied beside the exponentials, and the weights are
        # added up beside the product.
        top, pivot, correction = softmax_step(score, factor, top)
        if UNITS:
            acc = scaled(acc, correction, SWAP)
        weights = tl.exp2(score * factor - pivot[:, None])
        weights_in = weights.to(DTYPE)
        if not UNITS:
            total = add_up(total, correction, weights, SWAP)
        v = load_tile(
            v_ptr, v_descriptor, page, tile, first_key, kv_head, stride_v_page, stride_v_key, seen,
            PAGE_SIZE, V_HEAD_SIZE, BLOCK_N, BLOCK_DV, MASKED, True, FP8, FP8_NATIVE, DTYPE,
        )  # fmt: skip  # [N, DV]
        if not UNITS:
            acc = scaled(acc, correction, SWAP)
        if SWAP:
            acc = tl.dot(tl.trans(v), tl.trans(weights_in), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights_in, v, acc, input_precision="ieee")
        if UNITS:
            total = add_up(total, correction, weights, SWAP)
        # The next page as it is, since no page and no key is negative, but computed: Triton's pipeline passes on no values that are not; and with
        # each lane's own keys, or ptxas would wait for it here, to move it to a uniform register.
        if PREFETCH == 1:
            page = page_ahead
        elif PREFETCH == 2:
            page = tl.maximum(next_page, tl.where(key >= 0, 0, 1) if PAGE_SIZE % BLOCK_N != 0 else 0)
            next_page = tile_pages(
                row_table_ptr, i + 2, end, head_tiles, start_tile, prefix_max, lo_min, hi_max, MASKED, LEFT, RSWA, PAGE_SIZE, BLOCK_N
            )  # fmt: skip
    return acc, top, total
