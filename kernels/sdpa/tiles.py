"""How rows are cut for the fused CPU kernel: query blocks, tiles of keys, and calls that run several tiles at once.

Host arithmetic only. Three kinds of blocks, by what torch's fused CPU kernel is good at:

- up to ``FOLD_TOKENS`` tokens: the query heads of a KV head join the query dimension, so that one matrix product serves them;
- longer ones without any mask but causality: large blocks, whose own keys are a square that the kernel masks itself;
- longer ones under other masks: blocks of ``MASKED_TOKENS``, so that keys which nobody sees are left out.

The kernel gets float32, keys widened as they are gathered: partial results are then rounded once, when they are merged, and
for few tokens and for float16 it is several times as fast. Only a long block with a single tile may stay in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from attnmux.kernels.masks import Sight, Span

FOLD_TOKENS = 16
MASKED_TOKENS = 128
SHORT_KEYS = 512
LONG_KEYS = 2048
LONG_BYTES = 32 << 20
"""A tile of ``LONG_KEYS`` has fewer keys where they would need more scratch than this."""
LEAST_KEYS = 128
SCRATCH_BYTES_PER_THREAD = 6 << 20
"""Gathered keys of one call: they should still be in the cache when the kernel reads them."""
PARTIAL_BYTES = 32 << 20
"""Partial results held before they are merged."""
PADDING_BYTES = 512 << 10
"""A tile joins a call of wider tiles if it wastes no more; about what another call costs."""
ALIGNMENT = 64
_PARALLEL_SLICE = 32768
"""Elements from which ``index_select`` copies slices one after the other."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer group's tensors look like.

    Args:
        num_q_heads, num_kv_heads, head_size, v_head_size: as everywhere.
        page_size: keys of a page; 1 for packed keys.
        dtype: of q, keys and values.
        alibi: every tile has a bias.
        native: the kernel's own bfloat16 will do where its result is not worked on: neither its log-sum-exp (off by up to
            1e-4) is wanted, nor a sink to be added (a second rounding).
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    page_size: int
    dtype: torch.dtype
    alibi: bool
    native: bool
    unit: int = field(init=False)
    """Keys that are gathered together: a page, or the largest part of one that is copied in parallel."""

    def __post_init__(self) -> None:
        most = min(SHORT_KEYS, max(1, (_PARALLEL_SLICE - 1) // (self.num_kv_heads * max(self.head_size, self.v_head_size))))
        object.__setattr__(self, "unit", max(n for n in range(1, min(most, self.page_size) + 1) if self.page_size % n == 0))

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    def key_bytes(self, dtype: torch.dtype) -> int:
        """Scratch for one key and its value: as gathered, and widened if the kernel gets another ``dtype``."""
        itemsize = self.dtype.itemsize + (dtype.itemsize if dtype != self.dtype else 0)
        return self.num_kv_heads * (self.head_size + self.v_head_size) * itemsize

    @property
    def short_keys(self) -> int:
        """Keys of a tile of a folded or masked block, in whole units."""
        fitting = SCRATCH_BYTES_PER_THREAD // self.key_bytes(torch.float32)
        return max(1, min(SHORT_KEYS, max(LEAST_KEYS, fitting)) // self.unit) * self.unit

    @property
    def long_keys(self) -> int:
        """Keys of a tile, and tokens of a block, where causality is the only mask."""
        fitting = LONG_BYTES // self.key_bytes(torch.float32)
        return max(1, min(LONG_KEYS, max(SHORT_KEYS, fitting)) // self.unit) * self.unit


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its first query token in ``q``, its lengths, and what its masks need."""

    token: int
    q_len: int
    kv_len: int
    causal: bool = True
    spans: Sequence[Span] = ()
    prefix_len: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of query tokens against keys ``[lo, hi)``, each seen by some token of the block.

    Args:
        row: index of the row.
        token: the block's first token in ``q``.
        first: its position.
        q_len: tokens of the block.
        masked: not every token sees every key, or ALiBi.
        square: keys and tokens are the same positions, and causality is the only mask.
        dtype: what the kernel gets.
    """

    row: int
    token: int
    first: int
    q_len: int
    lo: int
    hi: int
    masked: bool
    square: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def folded(self) -> bool:
        return self.q_len <= FOLD_TOKENS and not self.square

    @property
    def keys(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True, slots=True)
class Block:
    """Query tokens ``[token, token + q_len)`` of one row and all their tiles."""

    token: int
    q_len: int
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Tiles with equally many query tokens that one kernel call runs; ``padded``: their keys are brought to one width."""

    tiles: tuple[Tile, ...]
    padded: bool


def cut_row(index: int, row: Row, sight: Sight, shape: Shape) -> Iterable[Block]:
    """The row's blocks in order."""
    bare = not shape.alibi and sight.window is None and sight.chunk is None and sight.rswa_window is None and not row.spans
    long = bare and row.q_len > FOLD_TOKENS
    blocks = -(-row.q_len // (shape.long_keys if long else MASKED_TOKENS))
    size = -(-row.q_len // blocks) if blocks else 1
    for start in range(0, row.q_len, size):
        q_len = min(size, row.q_len - start)
        first = row.kv_len - row.q_len + start
        tiles = tuple(_cut_keys(index, row, row.token + start, first, q_len, sight, shape, long)) if row.kv_len else ()
        if shape.native and len(tiles) == 1 and not tiles[0].folded:
            tiles = (replace(tiles[0], dtype=shape.dtype),)
        yield Block(row.token + start, q_len, tiles)


def _cut_keys(index: int, row: Row, token: int, first: int, q_len: int, sight: Sight, shape: Shape, long: bool) -> Iterable[Tile]:
    end = first + q_len
    if long and row.causal and sight.positions:
        for lo, hi in _pieces(0, first, shape.long_keys):
            yield Tile(index, token, first, q_len, lo, hi, masked=False)
        yield Tile(index, token, first, q_len, first, end, masked=False, square=True)
        return
    whole = sight.seen_by_all(first, end, row.causal, row.kv_len, row.prefix_len)
    chunk = shape.long_keys if long else shape.short_keys
    for start, stop in sight.seen_by_some(first, end, row.causal, row.kv_len, row.spans, row.prefix_len):
        for lo, hi in _pieces(start, stop, chunk):
            yield Tile(index, token, first, q_len, lo, hi, masked=shape.alibi or not any(a <= lo and hi <= b for a, b in whole))


def _pieces(start: int, stop: int, chunk: int) -> Iterable[tuple[int, int]]:
    """``[start, stop)`` cut at the multiples of ``chunk``."""
    while start < stop:
        hi = min(stop, (start // chunk + 1) * chunk)
        yield start, hi
        start = hi


def group_tiles(tiles: Iterable[Tile], shape: Shape, threads: int) -> list[Call]:
    """Calls that together run all tiles, ordered by their first token."""
    calls: list[Call] = []
    exact: dict[tuple[object, ...], list[Tile]] = {}
    for tile in tiles:
        exact.setdefault((tile.q_len, tile.dtype, tile.square, tile.masked, tile.lo % shape.unit, tile.keys), []).append(tile)
    single: dict[int, list[Tile]] = {}
    for same in exact.values():
        if len(same) == 1 and same[0].folded:
            single.setdefault(same[0].q_len, []).append(same[0])
            continue
        most = _most(same[0], shape, threads)
        calls += [Call(tuple(same[i : i + most]), padded=False) for i in range(0, len(same), most)]
    for ragged in single.values():
        calls += _pad(sorted(ragged, key=lambda tile: _units(tile, shape), reverse=True), shape, threads)
    return sorted(calls, key=lambda call: call.tiles[0].token)


def _pad(tiles: Sequence[Tile], shape: Shape, threads: int) -> Iterable[Call]:
    """Calls over tiles of falling width."""
    start = 0
    while start < len(tiles):
        most = start + _most(tiles[start], shape, threads)
        stop = start + 1
        while stop < min(len(tiles), most) and _waste(tiles[start], tiles[stop], shape) <= PADDING_BYTES:
            stop += 1
        chosen = sorted(tiles[start:stop], key=lambda tile: tile.token)
        yield Call(tuple(chosen), padded=len(chosen) > 1)
        start = stop


def _units(tile: Tile, shape: Shape) -> int:
    return -(-tile.hi // shape.unit) - tile.lo // shape.unit


def _waste(wide: Tile, narrow: Tile, shape: Shape) -> int:
    return (_units(wide, shape) - _units(narrow, shape)) * shape.unit * shape.key_bytes(wide.dtype)


def _most(tile: Tile, shape: Shape, threads: int) -> int:
    """Tiles like this one that a call may hold; as many for each thread, so that a thread computes what it gathered."""
    queries = tile.q_len * shape.num_q_heads
    partial = queries * (shape.v_head_size + (tile.keys if shape.alibi else 0)) * 4
    keys = _units(tile, shape) * shape.unit * shape.key_bytes(tile.dtype)
    most = min(threads * SCRATCH_BYTES_PER_THREAD // keys, PARTIAL_BYTES // partial)
    return max(1, most if most < threads else most // threads * threads)


def scratch_bytes(shape: Shape, threads: int) -> int:
    """Bytes for the gathered keys of any call, with room to align four buffers."""
    largest = (max(shape.long_keys, shape.short_keys) + 2 * shape.unit) * shape.key_bytes(torch.float32)
    return max(threads * SCRATCH_BYTES_PER_THREAD, largest) + 4 * ALIGNMENT
