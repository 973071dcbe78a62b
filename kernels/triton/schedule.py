"""Cutting a step's attention into work items of about equal size. Host arithmetic; the kernel reads true lengths from the device.

What the host knows may be an upper bound: a schedule decides only into how many parts a Q block's keys are cut, never which keys
are read, so a wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a token sees: keys to the left, itself included, keys to the right (``None``: to the row's end), and a global prefix."""

    left: int | None = None
    right: int | None = 0
    prefix: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Work items ``(row, Q block, part, parts, slot)`` and the merges ``(row, Q block, first slot, parts)`` of those in several parts."""

    items: list[tuple[int, int, int, int, int]]
    merges: list[tuple[int, int, int, int]]
    slots: int


MIN_TILES = 2
"""A part of fewer tiles costs more to merge than it saves."""


def schedule(
    rows: Sequence[int],
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    reach: Reach,
    block_q: int,
    block_n: int,
    kv_heads: int,
    programs: int,
    cut_tiles: int,
) -> Schedule:
    """Items for some rows.

    Args:
        rows: which.
        query_lens, kv_lens: of all rows; key lengths may be bounds.
        reach: how far tokens see.
        block_q, block_n: query tokens of a Q block, keys of a tile.
        kv_heads: programs an item stands for.
        programs: how many keep the device busy; work is cut until about so many exist.
        cut_tiles: cut at fixed places instead, this many tiles a part (0: evenly), and through slots even where one part does:
            the way a row is computed must not depend on how long the host thinks it is.
    """
    count_tiles = most_tiles if cut_tiles else likely_tiles
    blocks: list[tuple[int, int, int]] = []  # tiles, row, Q block
    for row in rows:
        for q_block in range(-(-query_lens[row] // block_q)):
            tiles = count_tiles(query_lens[row], kv_lens[row], q_block, reach, block_q, block_n)
            blocks.append((max(tiles, 1), row, q_block))
    total = sum(tiles for tiles, _, _ in blocks)
    share = max(MIN_TILES, -(-total * kv_heads // programs))
    blocks.sort(key=lambda block: -min(block[0], share))  # long ones first, or they are what the others wait for
    items: list[tuple[int, int, int, int, int]] = []
    merges: list[tuple[int, int, int, int]] = []
    slots = 0
    for tiles, row, q_block in blocks:
        parts = -(-tiles // (cut_tiles or share))
        if parts == 1 and not cut_tiles:
            items.append((row, q_block, 0, 1, -1))
            continue
        items.extend((row, q_block, part, parts, slots + part) for part in range(parts))
        merges.append((row, q_block, slots, parts))
        slots += parts
    return Schedule(items, merges, slots)


def likely_tiles(q_len: int, kv_len: int, q_block: int, reach: Reach, block_q: int, block_n: int) -> int:
    """Tiles that a Q block reads when ``kv_len`` is exact."""
    first = kv_len - q_len + q_block * block_q  # position of the block's first token
    hi = kv_len if reach.right is None else min(kv_len, first + block_q + reach.right)
    lo = 0 if reach.left is None else max(0, first - reach.left + 1)
    return -(-max(hi, 0) // block_n) - lo // block_n + min(-(-reach.prefix // block_n), lo // block_n)


def most_tiles(q_len: int, kv_len: int, q_block: int, reach: Reach, block_q: int, block_n: int) -> int:
    """Tiles that no Q block exceeds whatever its true length up to ``kv_len``: a shorter row may lie across one tile more."""
    whole = -(-kv_len // block_n)
    if reach.left is None or reach.right is None:
        return whole
    return min(whole, -(-(reach.left + block_q + reach.right) // block_n) + 1 + -(-reach.prefix // block_n))


def capacity(max_blocks: int, max_tiles: int, kv_heads: int, programs: int, cut_tiles: int) -> tuple[int, int]:
    """``(items, slots)`` that no schedule within the limits exceeds."""
    if cut_tiles:
        parts = max_blocks * -(-max_tiles // cut_tiles)
        return parts, parts
    cuts = -(-programs // kv_heads)  # sum of tiles / share is at most this; every cut block adds one more at most
    return max_blocks + cuts, 2 * cuts
