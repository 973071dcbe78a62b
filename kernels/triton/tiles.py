"""Reading tiles of keys and values: where their pages are, and the bytes themselves, by pointers or by tensor descriptors."""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.values import decode_fp8


@triton.jit
def tile_of(i, head_tiles, start_tile):
    """The tile of the row that is ``i``-th in reading order."""
    return tl.where(i < head_tiles, i, start_tile + i - head_tiles)


@triton.jit
def in_sight(key, count, prefix_max, lo_min, hi_max, LEFT: tl.constexpr, RSWA: tl.constexpr):
    """Whether some of ``count`` keys from ``key`` on lie between the bounds of what the Q block sees; ``LEFT``: there is one at the left."""
    seen = key < hi_max
    if LEFT:
        seen = seen & (key + count > lo_min)
    if RSWA > 0:
        seen = seen | (key < prefix_max)
    return seen


@triton.jit
def tile_pages(
    row_table_ptr,  # block table of the row
    i,  # which tile, in reading order
    end,  # from this one on none is read
    head_tiles,
    start_tile,
    prefix_max,
    lo_min,
    hi_max,
    MASKED: tl.constexpr,  # the tile may hold keys that nobody may see
    LEFT: tl.constexpr,
    RSWA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,  # 0: packed
    BLOCK_N: tl.constexpr,
):
    """Pages of a tile's keys: ``[N]``, or one where a page holds the tile. Entries of pages of which nobody sees a key are not read."""
    tile = tile_of(i, head_tiles, start_tile)
    wanted = i < end
    if PAGE_SIZE == 0:
        page = tile * 0
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(row_table_ptr + tile * BLOCK_N // PAGE_SIZE, mask=wanted, other=0)
    else:
        if BLOCK_N % PAGE_SIZE == 0:
            column = tile * (BLOCK_N // PAGE_SIZE) + tl.arange(0, BLOCK_N) // PAGE_SIZE  # [N]
        else:
            column = (tile * BLOCK_N + tl.arange(0, BLOCK_N)) // PAGE_SIZE
        mask = tl.full([BLOCK_N], True, tl.int1) & wanted
        if MASKED:  # by pages, of which a tile has fewer than keys
            mask = mask & in_sight(column * PAGE_SIZE, PAGE_SIZE, prefix_max, lo_min, hi_max, LEFT, RSWA)
        page = tl.load(row_table_ptr + column, mask=mask, other=0)
    return page


@triton.jit
def first_pages(
    row_table_ptr,  # [L]: block tables of rows
    tile,  # [L]
    wanted,  # [L] bool
    prefix_max,  # [L]
    lo_min,  # [L]
    hi_max,  # [L]
    LEFT: tl.constexpr,
    RSWA: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COUNT: tl.constexpr,  # pages of a tile
):
    """``[L, COUNT]``: what ``tile_pages`` gives of a tile of each of several rows, once a page."""
    column = (tile * BLOCK_N // PAGE_SIZE)[:, None] + tl.arange(0, COUNT)[None, :]  # [L, COUNT]
    mask = wanted[:, None] & (column >= 0)
    if PAGE_SIZE % BLOCK_N != 0:
        mask = mask & in_sight(column * PAGE_SIZE, PAGE_SIZE, prefix_max[:, None], lo_min[:, None], hi_max[:, None], LEFT, RSWA)
    return tl.load(row_table_ptr[:, None] + column, mask=mask, other=0)


@triton.jit
def load_tile(
    base_ptr,  # of this KV head
    descriptor,  # [pages, Hkv, page, SIZE] or None
    page,  # [N] or one: page of each key; packed: unused
    tile,
    first_key,  # packed: the row's first key
    kv_head,
    stride_page,
    stride_key,
    seen,  # [N] bool: keys that may be read; unused without MASKED
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,  # head size
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    ZERO: tl.constexpr,  # what may not be read comes as 0, also where a descriptor reads it
    FP8: tl.constexpr,  # the cache's format, as for decode_fp8; 0: not fp8
    FP8_NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """``[N, BLOCK]`` keys or values in the compute dtype. What lies beyond the pool or the head size comes as 0."""
    if descriptor is not None:
        raw = descriptor.load([page, kv_head, tile * BLOCK_N % PAGE_SIZE, 0]).reshape(BLOCK_N, BLOCK)
        if MASKED and ZERO:
            raw = tl.where(seen[:, None], raw, tl.zeros_like(raw))
    else:
        key = tl.arange(0, BLOCK_N)  # [N], in the tile
        if PAGE_SIZE == 0:
            row = (first_key + tile * BLOCK_N + key).to(tl.int64) * stride_key  # [N]
        elif BLOCK_N % PAGE_SIZE == 0:
            row = page.to(tl.int64) * stride_page + (key % PAGE_SIZE).to(tl.int64) * stride_key
        elif PAGE_SIZE % BLOCK_N == 0:
            row = page.to(tl.int64) * stride_page + (tile * BLOCK_N % PAGE_SIZE + key).to(tl.int64) * stride_key
        else:
            row = page.to(tl.int64) * stride_page + ((tile * BLOCK_N + key) % PAGE_SIZE).to(tl.int64) * stride_key
        column = tl.arange(0, BLOCK)
        pointers = base_ptr + row[:, None] + column[None, :]
        if MASKED and SIZE == BLOCK:
            raw = tl.load(pointers, mask=seen[:, None], other=0)
        elif MASKED:
            raw = tl.load(pointers, mask=seen[:, None] & (column[None, :] < SIZE), other=0)
        elif SIZE == BLOCK:
            raw = tl.load(pointers)
        else:
            raw = tl.load(pointers, mask=column[None, :] < SIZE, other=0)
    if FP8 == 0:
        values = raw
    elif not FP8_NATIVE:
        values = decode_fp8(raw, FP8).to(DTYPE)
    elif FP8 == 3:
        values = raw.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:
        values = raw.to(tl.float8e5, bitcast=True).to(DTYPE)
    return values
