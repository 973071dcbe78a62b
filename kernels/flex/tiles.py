"""Host side of a step: rows cut into tiles of query tokens, and the blocks of keys that each tile reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from attnmux.kernels.masks import Sight, Span

SHORT_TILE = 16
LONG_TILE = 128
"""Query tokens a tile holds, so a kernel's rows: one size for rows up to the short one, one for all others."""
MAX_SCORES = 2**23
"""Scores held at once where they are materialised."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row with query tokens and keys: where its tokens start, its lengths, and what its mask needs."""

    index: int
    token: int
    q_len: int
    kv_len: int
    causal: bool
    spans: Sequence[Span] = ()
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """Query tokens ``[token, token + count)`` of a row, the first at ``position``, and the row's blocks that they read."""

    row: Row
    token: int
    count: int
    position: int
    columns: tuple[int, ...]


def tile_size(row: Row) -> int:
    return SHORT_TILE if row.q_len <= SHORT_TILE else LONG_TILE


def cut(row: Row, size: int, sight: Sight, page_size: int) -> Iterator[Tile]:
    """The row's tiles that see some key."""
    for start in range(0, row.q_len, size):
        count = min(size, row.q_len - start)
        position = row.kv_len - row.q_len + start
        ranges = sight.seen_by_some(position, position + count, row.causal, row.kv_len, row.spans, row.prefix_len)
        columns = sorted({column for lo, hi in ranges for column in range(lo // page_size, -(-hi // page_size))})
        if columns:
            yield Tile(row, row.token + start, count, position, tuple(columns))


def apart(tiles: Sequence[Tile], page_size: int) -> tuple[list[Tile], list[Tile]]:
    """The same tiles without, and with only, the last block of a row that its keys do not fill."""
    whole: list[Tile] = []
    ragged: list[Tile] = []
    for tile in tiles:
        filled = tile.row.kv_len // page_size
        for found, columns in (
            (whole, tuple(c for c in tile.columns if c < filled)),
            (ragged, tuple(c for c in tile.columns if c >= filled)),
        ):
            if columns:
                found.append(Tile(tile.row, tile.token, tile.count, tile.position, columns))
    return whole, ragged


def bundles(tiles: Sequence[Tile], size: int, num_q_heads: int, page_size: int) -> Iterator[list[Tile]]:
    """Tiles of one row whose scores may exist at once."""
    bundle: list[Tile] = []
    columns: set[int] = set()
    for tile in tiles:
        together = columns | set(tile.columns)
        scores = (len(bundle) + 1) * num_q_heads * size * len(together) * page_size
        if bundle and (tile.row is not bundle[0].row or scores > MAX_SCORES):
            yield bundle
            bundle, together = [], set(tile.columns)
        bundle.append(tile)
        columns = together
    if bundle:
        yield bundle


def families(row: Row) -> Iterator[tuple[int, int, int]]:
    """Spans as ``(start, end, family)``; spans of one family see each other."""
    numbers: dict[object, int] = {}
    for i, (start, end, group) in enumerate(row.spans):
        yield start, min(end, row.kv_len), numbers.setdefault(("alone", i) if group is None else group, len(numbers))
