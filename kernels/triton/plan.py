"""Cutting a step's attention into work items, on the device, from the lengths that lie there. Once a step, for all layers.

A *unit* is one Q block. The device runs so many items of a KV head at once: its *places*. Units are cut into *parts* in one of two ways,
whichever ends sooner as this module counts. *Equal* parts of a unit: the shortest with which all parts find a place at once; with more units than
places, whole units, but those longer than an even share of everything, and those of a last round that would leave places empty. *Even*
shares of the step: units lie in a line, each as long as it costs, and are cut where another share is full, so that a part that is short
has others that fill its place.
The longest parts come first, and the hardware's own scheduler hands out the others as places get free. Source: even shares are stream-K's
(Osama et al. 2023), longest first is Graham's rule (1969).
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.tiles import first_pages, tile_of
from attnmux.kernels.triton.units import last_at_most, unit_facts

ITEM = tl.constexpr(32)
"""int32 of an item: row, Q block, first and last tile, tiles of the prefix, first tile after it, first and last tile that needs no
mask, keys of the prefix, least and greatest key, first token, query tokens, keys, slot (-1: none), parts of the unit; and from
ITEM_PAGES on the pages of its first two tiles, so that reading them need not wait for the block table."""
ITEM_PAGES = tl.constexpr(16)

CUT = tl.constexpr(5)
"""int32 of a unit's cut: its first item, first slot (-1: none) and merge, and the tiles of its first part and of the following ones."""
COST = tl.constexpr(3)
"""What an item costs besides its tiles, in tiles."""
MERGE = tl.constexpr(2)
"""What it costs that anything is to be merged at all."""
CLASSES = tl.constexpr(32)
"""Lengths told apart when items are put in order."""


@triton.jit(
    do_not_specialize=["seqs", "max_units", "max_items", "max_merges", "room", "least_len", "most_len", "stride_table"],
    do_not_specialize_on_alignment=[
        "query_start_ptr",
        "seq_lens_ptr",
        "prefix_lens_ptr",
        "causal_ptr",
        "first_ptr",
        "tiles_ptr",
        "cuts_ptr",
        "count_ptr",
        "merges_ptr",
        "table_ptr",
    ],
)
def plan_step(
    query_start_ptr,  # int32 [seqs + 1]
    seq_lens_ptr,  # int32 [seqs]
    prefix_lens_ptr,  # int32 [seqs] or None
    causal_ptr,  # bool as uint8 [seqs] or None
    row_span_start_ptr,  # int32 [seqs + 1] into row_spans, or None
    row_spans_ptr,  # int32 [spans, 3]
    first_ptr,  # int32 [seqs]: first unit of each row
    tiles_ptr,  # int32 [max_units]: tiles that each unit reads
    cuts_ptr,  # int32 [max_units, CUT]
    items_ptr,  # int32 [max_items, ITEM]
    count_ptr,  # int32 [2]: items and merges
    merges_ptr,  # int32 [max_merges]: first item of each unit in several parts
    table_ptr,  # int32 block table [seqs, columns]
    stride_table,
    seqs,
    max_units,
    max_items,
    max_merges,
    room,  # items of one KV head that the device holds at once
    least_len,  # rows of so many query tokens are meant
    most_len,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_RIGHT: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOKBACK: tl.constexpr,
    SPANS: tl.constexpr,
    GROUPS: tl.constexpr,
    RSWA: tl.constexpr,
    CUT_TILES: tl.constexpr,  # tiles of a part, whatever else is in the batch; 0: as fits best
    LEAST: tl.constexpr,  # tiles of a part; fewer cost more to merge than they save
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FIRST: tl.constexpr,  # pages of a tile, if items are to hold those of their first two; 0: not
    L: tl.constexpr,  # rows, units or items looked at side by side
):
    """One program. Each pass reads what the one before has stored."""
    lane = tl.arange(0, L)

    # Rows: the first unit of each.
    units = seqs * 0
    for at in range(0, seqs, L):
        row = at + lane
        q_len = tl.load(query_start_ptr + row + 1, mask=row < seqs, other=0) - tl.load(query_start_ptr + row, mask=row < seqs, other=0)
        count = tl.where((q_len >= least_len) & (q_len <= most_len), (q_len + BLOCK_Q - 1) // BLOCK_Q, 0)
        tl.store(first_ptr + row, units + tl.cumsum(count, axis=0) - count, mask=row < seqs)
        units += tl.sum(count, axis=0)
    units = tl.minimum(units, max_units)
    tl.debug_barrier()

    # Units: what each reads.
    total = (seqs * 0).to(tl.int64)
    longest = seqs * 0
    for at in range(0, units, L):
        unit = at + lane
        row, q_block, q_len, kv_len, bounds = unit_facts(
            unit, unit < units, first_ptr, seqs, query_start_ptr, seq_lens_ptr, prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr,
            CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, GROUPS, RSWA, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
        tiles = tl.where(unit < units, bounds[2], 0)
        tl.store(tiles_ptr + unit, tiles, mask=unit < units)
        total += tl.sum(tiles.to(tl.int64), axis=0)
        longest = tl.maximum(longest, tl.max(tiles, axis=0))
    tl.debug_barrier()

    # The cut of each unit, and how many items there are of each length.
    even, part, tail, tail_parts = units < 0, units * 0 + CUT_TILES, units * 0, units * 0 + 1
    share = part
    if CUT_TILES == 0:
        even, share, part, tail, tail_parts = way_to_cut(tiles_ptr, units, total, longest, room, LEAST, L)
    most = tl.minimum(tl.where(even, share + 2 * (LEAST - 1), part), longest)  # tiles of an item
    items = units * 0
    slots = units * 0
    merges = units * 0
    before = total * 0  # cost of earlier units
    lengths = tl.zeros([CLASSES], tl.int32)
    for at in range(0, units, L):
        unit = at + lane
        real = unit < units
        tiles = tl.load(tiles_ptr + unit, mask=real, other=0)
        parts = tl.maximum((tiles + part - 1) // part, 1)
        parts = tl.where(unit >= units - tail, tl.minimum(tail_parts, tl.maximum(tiles // LEAST, 1)), parts)
        following = tl.maximum((tiles + parts - 1) // parts, 1) if CUT_TILES == 0 else parts * 0 + CUT_TILES
        cost = tl.where(real, tiles + COST, 0).to(tl.int64)
        to_line = share - COST - ((before + tl.cumsum(cost, axis=0) - cost) % share).to(tl.int32)
        to_line = tl.where(to_line < LEAST, to_line + share, to_line)  # shorter parts are not worth a merge, at either end
        following = tl.where(even, share, following)
        first = tl.where(even, to_line, following)
        parts = 1 + (tl.maximum(tiles - first - tl.where(even, LEAST - 1, 0), 0) + following - 1) // following
        parts = tl.where(real, parts, 0)
        cut = (parts > 1).to(tl.int32)
        to = cuts_ptr + unit.to(tl.int64) * CUT
        tl.store(to, items + tl.cumsum(parts, axis=0) - parts, mask=real)
        tl.store(to + 1, tl.where(cut > 0, slots + tl.cumsum(parts * cut, axis=0) - parts * cut, -1), mask=real)
        tl.store(to + 2, merges + tl.cumsum(cut, axis=0) - cut, mask=real)
        tl.store(to + 3, first, mask=real)
        tl.store(to + 4, following, mask=real)
        lengths += tl.sum(of_class(tl.where(cut > 0, first, tiles), most) * real[:, None].to(tl.int32), axis=0)
        lengths += tl.sum(of_class(following, most) * tl.maximum(parts - 2, 0)[:, None], axis=0)
        lengths += tl.sum(of_class(tiles - first - (parts - 2) * following, most) * cut[:, None], axis=0)
        items += tl.sum(parts, axis=0)
        slots += tl.sum(parts * cut, axis=0)
        merges += tl.sum(cut, axis=0)
        before += tl.sum(cost, axis=0)
    tl.debug_barrier()

    # Items: one for each part, at its place among all by length.
    place = tl.cumsum(lengths, axis=0) - lengths  # [CLASSES], of the next item of each length
    for at in range(0, items, L):
        item = at + lane
        real = item < items
        unit = last_at_most(cuts_ptr, item, units, CUT)
        row, q_block, q_len, kv_len, bounds = unit_facts(
            unit, real, first_ptr, seqs, query_start_ptr, seq_lens_ptr, prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr,
            CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, GROUPS, RSWA, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
        head_tiles, start_tile, tiles, prefix_max, lo_min, hi_max, full_begin, full_end = bounds
        cut = cuts_ptr + unit.to(tl.int64) * CUT
        first_item = tl.load(cut, mask=real, other=0)
        first_slot = tl.load(cut + 1, mask=real, other=-1)
        merge = tl.load(cut + 2, mask=real, other=0)
        first = tl.load(cut + 3, mask=real, other=0)
        following = tl.load(cut + 4, mask=real, other=0)
        parts = tl.load(cut + CUT, mask=real & (unit + 1 < units), other=items) - first_item
        part_index = item - first_item
        begin = tl.where(part_index == 0, 0, first + (part_index - 1) * following)
        end = tl.where(part_index == parts - 1, tiles, first + part_index * following)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
        mine = of_class(end - begin, most) * real[:, None].to(tl.int32)  # [L, CLASSES]
        position = tl.sum(mine * (place[None, :] + tl.cumsum(mine, axis=0) - 1), axis=1)
        place += tl.sum(mine, axis=0)
        real = real & (position < max_items)
        tl.store(merges_ptr + merge, position, mask=real & (part_index == 0) & (parts > 1) & (merge < max_merges))
        to = items_ptr + position.to(tl.int64) * ITEM
        tl.store(to, row, mask=real)
        tl.store(to + 1, q_block, mask=real)
        tl.store(to + 2, begin, mask=real)
        tl.store(to + 3, end, mask=real)
        tl.store(to + 4, head_tiles, mask=real)
        tl.store(to + 5, start_tile, mask=real)
        tl.store(to + 6, full_begin, mask=real)
        tl.store(to + 7, full_end, mask=real)
        tl.store(to + 8, prefix_max, mask=real)
        tl.store(to + 9, lo_min, mask=real)
        tl.store(to + 10, hi_max, mask=real)
        tl.store(to + 11, tl.load(query_start_ptr + row, mask=real, other=0), mask=real)
        tl.store(to + 12, q_len, mask=real)
        tl.store(to + 13, kv_len, mask=real)
        tl.store(to + 14, tl.where(first_slot < 0, -1, first_slot + part_index), mask=real)
        tl.store(to + 15, parts, mask=real)
        if FIRST > 0:
            row_table_ptr = table_ptr + row.to(tl.int64) * stride_table
            LEFT: tl.constexpr = WINDOW > 0 or CHUNK > 0 or RSWA > 0
            for i in tl.static_range(2):
                tile = tile_of(begin + i, head_tiles, start_tile)
                page = first_pages(row_table_ptr, tile, real & (begin + i < end), prefix_max, lo_min, hi_max, LEFT, RSWA, PAGE_SIZE, BLOCK_N, FIRST)
                tl.store(to[:, None] + (ITEM_PAGES + i * FIRST) + tl.arange(0, FIRST)[None, :], page, mask=real[:, None])
    tl.store(count_ptr, tl.minimum(items, max_items))
    tl.store(count_ptr + 1, tl.minimum(merges, max_merges))


@triton.jit
def of_class(length, most):
    """``[L, CLASSES]``, 1 where the length belongs: those of ``most`` tiles to the first class."""
    shortness = CLASSES - 1 - (length.to(tl.uint32) * CLASSES // (most + 1).to(tl.uint32)).to(tl.int32)  # 64 bits take long to divide
    return (shortness[:, None] == tl.arange(0, CLASSES)[None, :]).to(tl.int32)


@triton.jit
def way_to_cut(tiles_ptr, units, total, longest, room, LEAST: tl.constexpr, L: tl.constexpr):
    """``(even, share, part, tail, tail_parts)``: whether to cut even shares, and of what cost; the longest of equal parts otherwise, and how
    many units at the end are cut, into how many parts each, to fill the last round.
    """
    share = tl.maximum((total + units * COST + room - 1) // room, LEAST + COST)
    last = units % room
    tail = units * 0
    tail_parts = room // tl.maximum(last, 1)
    if units <= room:
        part = least_part(tiles_ptr, units, total, longest, room, LEAST, L)
        equal = (part + COST).to(tl.int64)
    else:
        part = tl.maximum((total // room).to(tl.int32) + 1, LEAST)
        tail = tl.where((longest <= part) & (tail_parts > 1), last, 0)
        rounds = (units // room).to(tl.int64)
        equal = rounds * (longest + COST) + tl.where(last > 0, (longest + tail_parts - 1) // tail_parts + COST, 0)
    equal -= tl.where((longest > part) | (tail > 0), 0, MERGE)
    # More units than places that merge dear: they get ever shorter, and fill the places well as they are.
    return (share + COST < equal) & ((units <= room) | (LEAST == 1)), share.to(tl.int32), part, tail, tail_parts


@triton.jit
def least_part(tiles_ptr, units, total, longest, room, LEAST: tl.constexpr, L: tl.constexpr):
    """The least length of parts that all find a place at once."""
    low = tl.maximum((total // room).to(tl.int32), LEAST)
    high = tl.maximum(longest, low)
    lane = tl.arange(0, L)
    while low < high:
        middle = (low + high) // 2
        parts = units * 0
        for at in range(0, units, L):
            tiles = tl.load(tiles_ptr + at + lane, mask=at + lane < units, other=0)
            parts += tl.sum(tl.where(at + lane < units, tl.maximum((tiles + middle - 1) // middle, 1), 0), axis=0)
        high = tl.where(parts <= room, middle, high)
        low = tl.where(parts <= room, low, middle + 1)
    return low
