"""Cutting a step's attention into work items, on the device, from the lengths that lie there. Once a step, for all layers.

A *unit* is one Q block. Units long enough are cut into *parts*, so that the device is full and no program is waited for: parts of equal
length where all fit the device at once, whole units where there are more than that, and what is left over of the last round cut to fill
it. Source: the idea is that of stream-K (Osama et al. 2023), with the hardware's own scheduler in the place of its fixed programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnmux.kernels.triton.units import last_at_most, unit_facts

ITEM = tl.constexpr(16)
"""int32 of an item: row, Q block, first and last tile, tiles of the prefix, first tile after it, first and last tile that needs no
mask, keys of the prefix, least and greatest key, first token, query tokens, keys, slot (-1: none), parts of the unit."""

COST = tl.constexpr(3)
"""What an item costs besides its tiles, in tiles."""
FEW = tl.constexpr(5)
"""Fewer units than this part of the room are always cut well in one round."""
BUCKETS = tl.constexpr(4)
"""Lengths told apart when units are put in order."""


@triton.jit(
    do_not_specialize=["seqs", "max_units", "max_items", "max_merges", "room", "least_len", "most_len"],
    do_not_specialize_on_alignment=[
        "query_start_ptr",
        "seq_lens_ptr",
        "prefix_lens_ptr",
        "causal_ptr",
        "first_ptr",
        "tiles_ptr",
        "order_ptr",
        "cuts_ptr",
        "count_ptr",
        "merges_ptr",
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
    order_ptr,  # int32 [max_units]: units in the order of their items
    cuts_ptr,  # int32 [max_units, 2]: of the units in that order, the first item and the first slot (-1: none)
    items_ptr,  # int32 [max_items, ITEM]
    count_ptr,  # int32 [1]: items
    merges_ptr,  # int32 [max_merges]: first item of each unit in several parts, or -1
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

    # The longest part, and the units at the end that are cut to fill the last round.
    if CUT_TILES > 0:
        part_tiles = units * 0 + CUT_TILES
        tail = units * 0
        tail_parts = units * 0 + 1
    else:
        part_tiles = even_parts(tiles_ptr, units, total, longest, room, LEAST, L)
        tail = tl.where((units > room) & (longest <= part_tiles), units % room, 0)
        tail_parts = room // tl.maximum(tail, 1)

    # Order: units with the longest parts first, roughly, or the others will wait for them.
    ordered = units * 0
    for bucket in range(BUCKETS):
        for at in range(0, units, L):
            unit = at + lane
            tiles = tl.load(tiles_ptr + unit, mask=unit < units, other=0)
            length = tiles // tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)
            shortness = BUCKETS - 1 - length * BUCKETS // (tl.minimum(part_tiles, longest) + 1)
            mine = ((unit < units) & (shortness == bucket)).to(tl.int32)
            tl.store(order_ptr + ordered + tl.cumsum(mine, axis=0) - mine, unit, mask=mine > 0)
            ordered += tl.sum(mine, axis=0)
    tl.debug_barrier()

    # Parts, in that order: the first item and slot of each unit, and the list of those to merge.
    items = units * 0
    slots = units * 0
    merges = units * 0
    for at in range(0, units, L):
        place = at + lane
        unit = tl.load(order_ptr + place, mask=place < units, other=0)
        tiles = tl.load(tiles_ptr + unit, mask=place < units, other=0)
        parts = tl.maximum((tiles + part_tiles - 1) // part_tiles, 1)
        parts = tl.where(place >= units - tail, tl.minimum(tail_parts, tl.maximum(tiles // LEAST, 1)), parts)
        parts = tl.where(place < units, parts, 0)
        cut = (parts > 1).to(tl.int32)
        item = items + tl.cumsum(parts, axis=0) - parts
        slot = slots + tl.cumsum(parts * cut, axis=0) - parts * cut
        merge = merges + tl.cumsum(cut, axis=0) - cut
        tl.store(cuts_ptr + place * 2, item, mask=place < units)
        tl.store(cuts_ptr + place * 2 + 1, tl.where(cut > 0, slot, -1), mask=place < units)
        tl.store(merges_ptr + merge, item, mask=(cut > 0) & (merge < max_merges))
        items += tl.sum(parts, axis=0)
        slots += tl.sum(parts * cut, axis=0)
        merges += tl.sum(cut, axis=0)
    for at in range(merges, max_merges, L):
        tl.store(merges_ptr + at + lane, -1, mask=at + lane < max_merges)
    items = tl.minimum(items, max_items)
    tl.debug_barrier()

    # Items: one for each part.
    for at in range(0, items, L):
        item = at + lane
        real = item < items
        place = last_at_most(cuts_ptr, item, units, 2)
        unit = tl.load(order_ptr + place, mask=real, other=0)
        row, q_block, q_len, kv_len, bounds = unit_facts(
            unit, real, first_ptr, seqs, query_start_ptr, seq_lens_ptr, prefix_lens_ptr, causal_ptr, row_span_start_ptr, row_spans_ptr,
            CAUSAL, WINDOW, WINDOW_RIGHT, CHUNK, LOOKBACK, SPANS, GROUPS, RSWA, BLOCK_Q, BLOCK_N,
        )  # fmt: skip
        head_tiles, start_tile, tiles, prefix_max, lo_min, hi_max, full_begin, full_end = bounds
        first_item = tl.load(cuts_ptr + place * 2, mask=real, other=0)
        first_slot = tl.load(cuts_ptr + place * 2 + 1, mask=real, other=-1)
        parts = tl.load(cuts_ptr + place * 2 + 2, mask=real & (place + 1 < units), other=items) - first_item
        parts = tl.maximum(parts, 1)
        part = item - first_item
        if CUT_TILES > 0:
            begin = part * CUT_TILES
            end = tl.minimum(begin + CUT_TILES, tiles)
        else:
            begin = (tiles.to(tl.int64) * part // parts).to(tl.int32)
            end = (tiles.to(tl.int64) * (part + 1) // parts).to(tl.int32)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
        to = items_ptr + item.to(tl.int64) * ITEM
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
        tl.store(to + 14, tl.where(first_slot < 0, -1, first_slot + part), mask=real)
        tl.store(to + 15, parts, mask=real)
    tl.store(count_ptr, items)


@triton.jit
def even_parts(tiles_ptr, units, total, longest, room, LEAST: tl.constexpr, L: tl.constexpr):
    """Tiles of a part: the fewest with which all parts find room at once, or in two rounds where those end sooner.

    Where units alone are more than find room, only those longer than an even share of all tiles are cut.
    """
    if units > room:
        part = tl.maximum((total // room).to(tl.int32) + 1, LEAST)
    else:
        part = least_part(tiles_ptr, units, total, longest, room, 0, LEAST, L)
        if units * FEW > room:
            half = least_part(tiles_ptr, units, total, longest, 2 * room, 1, LEAST, L)
            part = tl.where(2 * (half + COST) < part + COST, half, part)
    return part


@triton.jit
def least_part(tiles_ptr, units, total, longest, room, short, LEAST: tl.constexpr, L: tl.constexpr):
    """The least length of parts that fit ``room`` places of that length: one a place, but units of at most half of it take ``short``: none
    where they fill gaps, one where no launch is to have more items than places.
    """
    low = tl.maximum((total // room).to(tl.int32), LEAST)
    high = tl.maximum(longest, low)
    lane = tl.arange(0, L)
    while low < high:
        middle = (low + high) // 2
        parts = units * 0
        for at in range(0, units, L):
            tiles = tl.load(tiles_ptr + at + lane, mask=at + lane < units, other=0)
            taken = tl.where(2 * tiles > middle, (tiles + middle - 1) // middle, short)
            parts += tl.sum(tl.where(at + lane < units, taken, 0), axis=0)
        high = tl.where(parts <= room, middle, high)
        low = tl.where(parts <= room, low, middle + 1)
    return low
