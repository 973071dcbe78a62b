"""Cutting a step's attention into work items of about equal size. Host arithmetic; the kernel reads true lengths from the device.

What the host knows may be an upper bound: a schedule decides only into how many parts a Q block's keys are cut, never which keys
are read, so a wrong guess costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a token sees, for estimates: keys to the left, keys of a global prefix, and whether to its right."""

    left: int | None = None
    prefix: int = 0
    right: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Work items ``(row, Q block, part, parts, slot)`` and the merges ``(row, Q block, first slot, parts)`` of those in several parts."""

    items: list[tuple[int, int, int, int, int]]
    merges: list[tuple[int, int, int, int]]
    slots: int


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
        cut_tiles: cut at fixed places instead, this many tiles a part (0: evenly).
    """
    blocks: list[tuple[int, int, int]] = []  # tiles, row, Q block
    for row in rows:
        q_len, kv_len = query_lens[row], kv_lens[row]
        for q_block in range(-(-q_len // block_q)):
            last = kv_len if reach.right else min(kv_len, kv_len - q_len + (q_block + 1) * block_q)
            first = 0 if reach.left is None else max(0, kv_len - q_len + q_block * block_q - reach.left + 1)
            tiles = -(-max(last, 0) // block_n) - first // block_n
            tiles += min(-(-reach.prefix // block_n), first // block_n)
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


MIN_TILES = 2
"""A part of fewer tiles costs more to merge than it saves."""


def capacity(max_blocks: int, max_tiles: int, kv_heads: int, programs: int, cut_tiles: int) -> tuple[int, int]:
    """``(items, slots)`` that no schedule within the limits exceeds."""
    if cut_tiles:
        parts = max_blocks * -(-max_tiles // cut_tiles)
        return parts, parts
    cuts = -(-programs // kv_heads)  # sum of tiles / share is at most this; every cut block adds one more at most
    return max_blocks + cuts, 2 * cuts
