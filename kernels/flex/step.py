"""From tiles to tables: :class:`Part`, the arguments of one call of FlexAttention, and :class:`Step`, all of a plan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmux.kernels.flex.look import Look, Tables
from attnmux.kernels.flex.tiles import LONG_TILE, SHORT_TILE, Row, Tile, apart, bundles, cut, families, tile_size

PACKED_BLOCK = 64
"""Keys of a block where they are packed, and so copied."""


@dataclass(slots=True, eq=False)
class Part:
    """Tiles of one size over one tensor of keys.

    Args:
        size: query tokens of a tile, padding included.
        tokens: int64 ``[T * size]``, token at each place of a tile; padding repeats the tile's first.
        places, written: int64, the places that hold a token of their own, and those tokens.
        tables: ``logical`` is the part's where its blocks are copied, otherwise made for the pool at hand.
        source: int64, pages (packed: keys) to copy; ``None`` where the pool itself is read.
        kept: bool ``[blocks * page]``, which of the copied keys are the rows'.
        owned: where the pool is read, ``(row, page, column)`` of every block.
    """

    size: int
    tokens: Tensor
    places: Tensor
    written: Tensor
    tables: Tables
    source: Tensor | None = None
    kept: Tensor | None = None
    owned: tuple[Tensor, Tensor, Tensor] | None = None
    pools: dict[tuple[int, int], Tables] = field(default_factory=dict)

    def over(self, pages: int, spread: int) -> Tables:
        """The tables for a pool of so many pages, whose blocks lie ``spread`` apart."""
        if self.owned is None:
            return self.tables
        if (pages, spread) not in self.pools:
            rows, owned, columns = self.owned
            logical = torch.full((self.tables.seq_len.shape[0], max(2, pages)), -1, dtype=torch.int32, device=owned.device)
            logical[rows, owned] = columns
            self.pools[pages, spread] = self.tables._replace(logical=logical, blocks=self.tables.blocks * spread)
        return self.pools[pages, spread]


@dataclass(slots=True, eq=False)
class Step:
    """A plan's rows; the parts are made when the form of the pools is known, and once.

    Args:
        look: what the kernels compute.
        rows: those with query tokens and keys.
        num_tokens: of all rows, also of those without keys.
        num_q_heads: query heads.
        where: int32 block table ``[seqs, cols]``, or where ``packed`` first keys ``[seqs + 1]``.
        packed: keys have no pages.
        materialised: every score exists at once, so parts are kept small.
    """

    look: Look
    rows: Sequence[Row]
    num_tokens: int
    num_q_heads: int
    where: Tensor
    packed: bool
    materialised: bool
    _parts: dict[bool, list[Part]] = field(default_factory=dict)

    def parts(self, in_place: bool) -> list[Part]:
        """Calls to make; ``in_place`` reads whole blocks where they lie and copies only those that a row does not fill."""
        if in_place not in self._parts:
            self._parts[in_place] = [part for size in (SHORT_TILE, LONG_TILE) for part in self._of_size(size, in_place)]
        return self._parts[in_place]

    def _of_size(self, size: int, in_place: bool) -> list[Part]:
        page = self.look.page_size
        tiles = [tile for row in self.rows if tile_size(row) == size for tile in cut(row, size, self.look.sight, page)]
        if self.materialised and not in_place:
            return [self._part(bundle, size, False) for bundle in bundles(tiles, size, self.num_q_heads, page)]
        whole, ragged = apart(tiles, page) if in_place else ([], tiles)
        return [self._part(some, size, pool) for some, pool in ((whole, True), (ragged, False)) if some]

    def _part(self, tiles: Sequence[Tile], size: int, pool: bool) -> Part:
        rows = list({tile.row.index: tile.row for tile in tiles}.values())
        number = {row.index: i for i, row in enumerate(rows)}
        entries = sorted({(number[tile.row.index], column) for tile in tiles for column in tile.columns})
        block = {entry: i for i, entry in enumerate(entries)}
        ints = _sender(self.where.device)
        local = ints([i for i, _ in entries])
        columns = ints([column for _, column in entries])
        seqs = ints([rows[i].index for i, _ in entries])
        tokens, places, written = _tokens(tiles, size)
        part = Part(size, ints(tokens), ints(places), ints(written), self._tables(tiles, rows, number, block, ints))
        if pool:
            pages = self.where[seqs, columns].long()
            part.owned = local, pages, columns.int()
            part.tables = part.tables._replace(blocks=_looked_up(part.tables.blocks, pages))
            return part
        position = columns[:, None] * self.look.page_size + torch.arange(self.look.page_size, device=self.where.device)
        ends = ints([rows[i].kv_len for i, _ in entries])[:, None]
        part.kept = (position < ends).flatten()
        part.source = (self.where[seqs][:, None] + torch.minimum(position, ends - 1)).flatten() if self.packed else self.where[seqs, columns].long()
        return part

    def _tables(
        self, tiles: Sequence[Tile], rows: Sequence[Row], number: dict[int, int], block: dict[tuple[int, int], int], ints: Callable[..., Tensor]
    ) -> Tables:
        """Tables whose blocks are numbered as they are copied. No dimension is 1: a compiled kernel would take it for fixed."""
        spare = max(0, 2 - len(tiles))
        most = max(2, *(len(tile.columns) for tile in tiles))
        lists = [[block[number[t.row.index], c] for c in t.columns] for t in tiles]
        logical = torch.full((max(2, len(rows)), max(2, len(block))), -1, dtype=torch.int32)
        for (row, column), i in block.items():
            logical[row, i] = column
        padded = [*rows, *[rows[0]] * max(0, 2 - len(rows))]
        sight = self.look.sight
        i32 = torch.int32
        return Tables(
            row=ints([number[t.row.index] for t in tiles] + [0] * spare, i32),
            first=ints([t.position for t in tiles] + [0] * spare, i32),
            seq_len=ints([row.kv_len for row in padded], i32),
            causal=ints([row.causal for row in padded], torch.bool) if self.look.causal is None else None,
            prefix_len=ints([row.prefix_len for row in padded], i32) if sight.rswa_window is not None else None,
            family=_families(padded).to(self.where.device, non_blocking=True) if sight.mm_prefix is not None else None,
            logical=logical.to(self.where.device, non_blocking=True),
            num_blocks=ints([len(t.columns) for t in tiles] + [0] * spare, i32)[:, None, None],
            blocks=ints([[*some, *[0] * (most - len(some))] for some in lists] + [[0] * most] * spare, i32)[:, None, None],
        )


def _sender(device: torch.device) -> Callable[..., Tensor]:
    def send(values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

    return send


def _tokens(tiles: Sequence[Tile], size: int) -> tuple[list[int], list[int], list[int]]:
    """Token at every place of the tiles, the places with a token of their own, and those tokens."""
    tokens: list[int] = []
    places: list[int] = []
    written: list[int] = []
    for i, tile in enumerate(tiles):
        own = range(tile.token, tile.token + tile.count)
        tokens += [*own, *[tile.token] * (size - tile.count)]
        places += range(i * size, i * size + tile.count)
        written += own
    return tokens + tokens[:1] * size * max(0, 2 - len(tiles)), places, written


def _looked_up(blocks: Tensor, pages: Tensor) -> Tensor:
    return pages.to(torch.int32)[blocks.long()]


def _families(rows: Sequence[Row]) -> Tensor:
    table = torch.full((len(rows), max(2, *(row.kv_len for row in rows))), -1, dtype=torch.int32)
    for i, row in enumerate(rows):
        for start, end, family in families(row):
            table[i, start:end] = family
    return table
