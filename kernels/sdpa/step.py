"""A batch prepared for all layers: where each call's queries and keys lie, and its masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from attnmux.kernels.masks import Sight
from attnmux.kernels.reference import alibi_distance
from attnmux.kernels.sdpa.tiles import MASKED_TOKENS, PARTIAL_BYTES, Block, Call, Row, Shape, Tile, cut_row, group_tiles


@dataclass(slots=True)
class KeyRun:
    """Keys that stand together: from element ``start`` of the cache, ``stride`` elements apart; widened into ``wide``."""

    start: int
    stride: int
    wide: Tensor | None = None


@dataclass(slots=True)
class KeySlices:
    """Keys to gather in slices of ``size`` elements, slice ``i`` from element ``places[i] * step`` of the cache.

    Args:
        places: int64, for ``[R, units]`` slices of ``[unit, Hkv, D]``; head-major for ``[R, Hkv, units]`` of ``[unit, D]``, or
            for ``[R, Hkv, units, unit]`` of ``[D]``.
        fill: int64, places among the gathered keys (``[R, w]``, head-major ``[R, Hkv, w]``) that are padding and set to 0.
        held: scratch memory for the slices.
        found: the same as ``[R, Hkv, w, D]``.
        wide: scratch memory for the keys in another dtype.
    """

    places: Tensor
    size: int
    step: int
    head_major: bool
    fill: Tensor | None
    last: int = field(init=False)
    held: Tensor = field(init=False)
    found: Tensor = field(init=False)
    wide: Tensor | None = None

    def __post_init__(self) -> None:
        self.last = int(self.places.max())


@dataclass(slots=True)
class Work:
    """One kernel call: ``R`` tiles of ``n`` query tokens and ``w`` keys each; ``G`` query heads share a KV head.

    Args:
        tokens: int64 ``[R * n]``, places in q.
        span: their range, where they stand together and in order.
        tiles, q_len, keys: ``R``, ``n``, ``w``.
        page, part: int64 ``[R, units]``: the page of each unit of keys, and which part of the page it is.
        skip: keys of the first unit that are not the tile's.
        dtype: what the kernel gets.
        folded: ``G`` joins the query dimension.
        square: the kernel masks causally.
        outside: int64, places in ``[R, w]`` that are padding.
        mask: float32, 0 or ``-inf``: ``[R, 1, n, w]``, folded ``[R, 1, n * G, w]``, folded with ALiBi ``[R, 1, n, 1, w]``.
        distance: what ALiBi's slopes multiply, shaped like ``mask``.
        blind: bool ``[R * n, 1]``, tokens that see no key of the tile.
        sources: by role and cache geometry.
    """

    tokens: Tensor
    span: tuple[int, int] | None
    tiles: int
    q_len: int
    keys: int
    page: Tensor
    part: Tensor
    skip: int
    dtype: torch.dtype
    folded: bool
    square: bool
    outside: Tensor | None = None
    mask: Tensor | None = None
    distance: Tensor | None = None
    blind: Tensor | None = None
    sources: dict[tuple[object, ...], KeyRun | KeySlices] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """Work whose partial results are held together. ``index`` is the token of each result within the segment, ``None``: in order."""

    works: list[Work]
    index: Tensor | None
    once: bool
    """No token has two results."""


@dataclass(slots=True)
class Segment:
    """Query tokens ``[lo, hi)`` and everything that adds to them."""

    lo: int
    hi: int
    parts: list[Part]


@dataclass(slots=True)
class Step:
    """A prepared batch. ``scratch`` is uint8, at least :func:`~attnmux.kernels.sdpa.tiles.scratch_bytes` long."""

    shape: Shape
    kv_layout: Literal["NHD", "HND"]
    scale: float
    scratch: Tensor
    segments: list[Segment]


def prepare(
    rows: Sequence[Row],
    table: Tensor,
    *,
    shape: Shape,
    sight: Sight,
    alibi: Literal["linear", "sqrt"] | None,
    kv_layout: Literal["NHD", "HND"],
    scale: float,
    scratch: Tensor,
    threads: int,
    packed: bool,
) -> Step:
    """Cut and prepare a batch.

    Args:
        rows: in the order of their tokens, without gaps.
        table: int32 block table ``[seqs, cols]``; packed: first key of each row ``[seqs]``.
        shape, sight, alibi, kv_layout, scale: of the layer group.
        scratch: see :class:`Step`.
        threads: cores to keep busy.
        packed: keys lie one after the other, without pages.
    """
    builder = _Builder(rows, table, shape, sight, alibi, packed)
    blocks = [block for i, row in enumerate(rows) for block in cut_row(i, row, sight, shape)]
    segments = [builder.segment(chosen, threads) for chosen in _segments(blocks, shape)]
    return Step(shape, kv_layout, scale, scratch, segments)


def _partial_bytes(tiles: Iterable[Tile], shape: Shape) -> int:
    return sum(tile.q_len for tile in tiles) * shape.num_q_heads * shape.v_head_size * 4


def _segments(blocks: Iterable[Block], shape: Shape) -> Iterable[list[Block]]:
    """Blocks in runs whose partial results can be held together. Large blocks stand alone: putting results together is a copy."""
    run: list[Block] = []
    held = 0
    for block in blocks:
        size = _partial_bytes(block.tiles, shape)
        if run and (held + size > PARTIAL_BYTES or block.q_len > MASKED_TOKENS or run[-1].q_len > MASKED_TOKENS):
            yield run
            run, held = [], 0
        run.append(block)
        held += size
    if run:
        yield run


class _Builder:
    """Turns tiles into tensors."""

    def __init__(self, rows: Sequence[Row], table: Tensor, shape: Shape, sight: Sight, alibi: Literal["linear", "sqrt"] | None, packed: bool) -> None:
        self.rows, self.table, self.shape, self.sight, self.alibi, self.packed = rows, table, shape, sight, alibi, packed

    def segment(self, blocks: Sequence[Block], threads: int) -> Segment:
        lo, hi = blocks[0].token, blocks[-1].token + blocks[-1].q_len
        parts: list[Part] = []
        run: list[Call] = []
        held = 0
        for call in group_tiles((tile for block in blocks for tile in block.tiles), self.shape, threads):
            size = _partial_bytes(call.tiles, self.shape)
            if run and held + size > PARTIAL_BYTES:
                parts.append(self._part(run, lo, hi))
                run, held = [], 0
            run.append(call)
            held += size
        if run:
            parts.append(self._part(run, lo, hi))
        return Segment(lo, hi, parts)

    def _part(self, calls: Sequence[Call], lo: int, hi: int) -> Part:
        works = [self._work(call) for call in calls]
        index = torch.cat([work.tokens for work in works]) - lo
        in_order = index.shape[0] == hi - lo and bool((index == torch.arange(hi - lo)).all())
        return Part(works, None if in_order else index, once=len(set(index.tolist())) == index.shape[0])

    def _work(self, call: Call) -> Work:
        tiles, shape, first_tile = call.tiles, self.shape, call.tiles[0]
        q_len, folded = first_tile.q_len, first_tile.folded
        tokens = (_column([t.token for t in tiles]) + torch.arange(q_len)).flatten()  # [R * n]
        together = all(tile.token == first_tile.token + i * q_len for i, tile in enumerate(tiles))
        page, part, start = self._units(tiles)
        skip = 0 if call.padded else first_tile.lo - int(start[0])
        keys = page.shape[1] * shape.unit if call.padded else first_tile.keys
        work = Work(
            tokens=tokens,
            span=(first_tile.token, first_tile.token + tokens.shape[0]) if together else None,
            tiles=len(tiles),
            q_len=q_len,
            keys=keys,
            page=page,
            part=part,
            skip=skip,
            dtype=first_tile.dtype,
            folded=folded,
            square=first_tile.square,
        )
        if call.padded or any(tile.masked for tile in tiles):
            self._mask(work, tiles, start[:, None] + skip + torch.arange(keys))
        return work

    def _units(self, tiles: Sequence[Tile]) -> tuple[Tensor, Tensor, Tensor]:
        """Page and part of each unit ``[R, units]``, and the position ``[R]`` where the first unit begins. Padding repeats the last unit."""
        unit, page_size = self.shape.unit, self.shape.page_size
        first, last = _column([t.lo // unit for t in tiles]), _column([(t.hi - 1) // unit for t in tiles])
        number = torch.minimum(first + torch.arange(int((last - first).max()) + 1), last)  # [R, units]
        row = _column([t.row for t in tiles])
        if self.packed:
            return self.table[row].long() + number, torch.zeros_like(number), first[:, 0]
        key = number * unit
        return self.table[row, key // page_size].long(), key % page_size // unit, first[:, 0] * unit

    def _mask(self, work: Work, tiles: Sequence[Tile], k_pos: Tensor) -> None:
        """Set what hides keys; ``k_pos [R, w]``."""
        q_pos = _column([t.first for t in tiles]) + torch.arange(work.q_len)  # [R, n]
        own = (k_pos >= _column([t.lo for t in tiles])) & (k_pos < _column([t.hi for t in tiles]))  # [R, w]
        seen = self._seen(tiles, q_pos[:, :, None], k_pos[:, None, :]) & own[:, None, :]  # [R, n, w]
        if not bool(own.all()):
            work.outside = (~own).flatten().nonzero()[:, 0]
        blind = ~seen.any(-1)
        if bool(blind.any()):
            work.blind = blind.flatten()[:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        if self.alibi is not None:
            distance = alibi_distance(q_pos[:, :, None], k_pos[:, None, :], self.alibi, torch.float32)
            work.mask, work.distance = (t[:, None, :, None, :] if work.folded else t[:, None] for t in (mask, distance))
        else:
            work.mask = (mask.repeat_interleave(self.shape.group, 1) if work.folded else mask)[:, None]

    def _seen(self, tiles: Sequence[Tile], q_pos: Tensor, k_pos: Tensor) -> Tensor:
        rows = [self.rows[tile.row] for tile in tiles]
        if any(row.spans for row in rows):
            per_tile = zip(rows, q_pos, k_pos, strict=True)
            return torch.stack([self.sight.mask(q, k, row.causal, row.kv_len, row.spans, row.prefix_len) for row, q, k in per_tile])
        causal = True if all(row.causal for row in rows) else torch.tensor([row.causal for row in rows])[:, None, None]
        lengths, prefixes = _column([row.kv_len for row in rows])[..., None], _column([row.prefix_len for row in rows])[..., None]
        return self.sight.mask(q_pos, k_pos, causal, lengths, (), prefixes)


def _column(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)[:, None]
