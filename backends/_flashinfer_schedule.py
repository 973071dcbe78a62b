"""What FlashInfer's fa2 scheduler will ask for, and how to cut rows where its own cut leaves the device idle.

The rules are those of ``PrefillSplitQOKVIndptr`` and ``PrefillPlan`` (``attention/scheduler.cuh``, the same from 0.7.2 to 0.7.4). Should a
later version want more room, its allocator says so when a step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits

CTAS_PER_SM = 2
LEAST_CUT = 256
"""Keys that a part has at least: shorter ones cost more to merge than they save."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def query_tile(packed: int, v_head_size: int) -> int:
    """Query rows of a tile, where a row of ``n`` tokens has ``packed = n * group`` rows."""
    if v_head_size >= 512:
        return 16 if packed <= 32 else 32
    if packed > 64 and v_head_size < 256:
        return 128
    return 64 if packed > 16 else 16


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A spec on a device of so many multiprocessors."""

    spec: AttentionSpec
    multiprocessors: int

    @property
    def slots(self) -> int:
        """Tiles of one KV head that the device holds at once."""
        return max(1, CTAS_PER_SM * self.multiprocessors // self.spec.num_kv_heads)

    def scratch(self, tiles: int, tile: int) -> int:
        """Bytes of partial outputs and their sums for so many tiles of keys and queries."""
        rows = ceil_div(tiles * tile, self.spec.group)
        return 4 * rows * self.spec.num_q_heads * (self.spec.v_head_size + 1) + 64

    def stock_scratch(self) -> int:
        """Bytes for any batch that FlashInfer cuts itself: it never cuts into more tiles than :attr:`slots`."""
        return self.scratch(self.slots, query_tile(2**31, self.spec.v_head_size))

    def captured_tiles(self, seqs: int, tokens: int) -> tuple[int, int]:
        """Tiles and tile size of a launch whose shape must hold for any lengths of so many rows and tokens."""
        tile = query_tile((tokens - seqs + 1) * self.spec.group, self.spec.v_head_size)
        return max(self.slots, ceil_div(tokens * self.spec.group, tile) + seqs - 1), tile

    def captured_scratch(self, limits: Limits) -> int:
        """Bytes for any captured batch of decode rows within the limits."""
        seqs, longest = limits.max_num_seqs, min(limits.max_query_len, MAX_DECODE_TOKENS)
        tokens = captured_tokens(seqs, longest, limits)
        if longest == 1:  # no row can be longer, so the tile is known
            sizes = [query_tile(self.spec.group, self.spec.v_head_size)]
        else:
            sizes = [t for t in (16, 32, 64, 128) if t <= query_tile(tokens * self.spec.group, self.spec.v_head_size)]
        return max(self.scratch(max(self.slots, ceil_div(tokens * self.spec.group, t) + seqs - 1), t) for t in sizes)

    def cut(self, query_lens: Sequence[int], pages: Sequence[int], page_size: int, window_left: int) -> tuple[int, int] | None:
        """Pages of a part and the scratch that it takes, or ``None`` where FlashInfer's own cut will do.

        Its plan stops cutting as soon as the device is full of tiles, however unlike they are: of one row of 40,000 keys among 31 short ones
        half the keys stay in one tile. Here every part has about the same keys.
        """
        group = self.spec.group
        tile = query_tile(sum(query_lens) * group // max(1, len(query_lens)), self.spec.v_head_size)
        reach = ceil_div(window_left + tile, page_size) if window_left >= 0 else 2**31
        rows = [(ceil_div(q * group, tile), max(1, min(p, reach))) for q, p in zip(query_lens, pages, strict=True) if q]
        if not rows:
            return None
        least = max(LEAST_CUT // page_size, 1)
        even = max(ceil_div(sum(tiles * p for tiles, p in rows), self.slots), least)
        if self._stock_part(rows, max(128 // page_size, 1)) <= 2 * even:
            return None
        return even, self.scratch(_parts(rows, even), tile)

    def _stock_part(self, rows: Sequence[tuple[int, int]], least: int) -> int:
        low, high = least, max(p for _, p in rows)
        while low < high:
            middle = (low + high) // 2
            if _parts(rows, middle) > self.slots:
                low = middle + 1
            else:
                high = middle
        return min(low, max(p for _, p in rows))


def _parts(rows: Sequence[tuple[int, int]], part: int) -> int:
    return sum(tiles * ceil_div(p, part) for tiles, p in rows)


def captured_tokens(seqs: int, longest: int, limits: Limits) -> int:
    """Query tokens for which a captured launch of so many rows has room."""
    return max(seqs, min(seqs * longest, limits.max_num_tokens))


def int_bytes(seqs: int, tokens: int, tiles: int) -> int:
    """Bytes that hold the tables of a plan of so many tiles, rounded up so that plans of like size share a buffer."""
    needed = 13 * tiles + 4 * (tokens + seqs + 2) + 512
    return int(max(1 << 16, 1 << (needed - 1).bit_length()))
