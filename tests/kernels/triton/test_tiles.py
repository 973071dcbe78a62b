"""Reading tiles: which entries of a block table are read, and which numbers come, by pointers and by descriptors, in probe kernels."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from attnmux.kernels.triton import descriptors, launch, parameters
from attnmux.kernels.triton.tiles import load_tile, tile_of, tile_pages

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
N, KEYS, HEADS, NEVER = 16, 96, 2, 2**31 - 1
PAGE_SIZES = (1, 8, 16, 32, 3, 12, 24)  # smaller than the tile, equal, larger, and some that neither divide it nor are divided
BOUNDS = {"window": (23, 70, 0), "prefix": (60, 96, 21), "one key": (55, 56, 0), "nothing": (0, 0, 0)}


@triton.jit
def _pages(table_ptr, out_ptr, tiles, wanted, lo_min, hi_max, prefix_max, MASKED: tl.constexpr, PAGE_SIZE: tl.constexpr, N: tl.constexpr):
    for tile in range(tiles):
        page = tile_pages(table_ptr, tile, wanted, 0, 0, prefix_max, lo_min, hi_max, MASKED, True, 1, PAGE_SIZE, N)
        tl.store(out_ptr + tile * N + tl.arange(0, N), tl.zeros([N], tl.int32) + page)


@triton.jit
def _tiles(
    pool_ptr, descriptor, table_ptr, out_ptr, tiles, first_key, stride_page, stride_key, stride_head, lo_min, hi_max, prefix_max, HEADS: tl.constexpr,
    MASKED: tl.constexpr, ZERO: tl.constexpr, PAGE_SIZE: tl.constexpr, SIZE: tl.constexpr, FP8: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    for head in range(HEADS):
        for tile in range(tiles):
            key = tile * N + tl.arange(0, N)
            seen = ((key >= lo_min) & (key < hi_max)) | (key < prefix_max)
            end = tile + tl.max(seen.to(tl.int32), axis=0)
            page = tile_pages(table_ptr, tile, end, 0, 0, prefix_max, lo_min, hi_max, MASKED, True, 1, PAGE_SIZE, N)
            values = load_tile(
                pool_ptr + head * stride_head, descriptor, page, tile, first_key, head, stride_page, stride_key, seen,
                PAGE_SIZE, SIZE, N, BLOCK, MASKED, ZERO, FP8, False, tl.float32,
            )  # fmt: skip
            to = out_ptr + ((head * tiles + tile) * N + tl.arange(0, N))[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(to, values.to(tl.float32))


def visible(bounds: tuple[int, int, int], keys: int) -> torch.Tensor:
    """Which of the keys may be read."""
    key, (lo, hi, prefix) = torch.arange(keys), bounds
    return ((key >= lo) & (key < hi)) | (key < prefix)


def paged(page_size: int, size: int, seen: torch.Tensor, dtype: torch.dtype, hnd: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A pool as ``[pages, page, HEADS, size]``, its block table, and what its row holds: ``[HEADS, keys, size]``, 0 where not seen.

    Unseen keys hold NaN, unused pages too, and the table sends whole pages of unseen keys out of this world.
    """
    columns = -(-len(seen) // page_size)
    pages = torch.randperm(columns + 3)
    pool = torch.full((columns + 3, HEADS, page_size, size), torch.nan) if hnd else torch.full((columns + 3, page_size, HEADS, size), torch.nan)
    pool = (pool.transpose(1, 2) if hnd else pool).to(dtype)  # keeps strides
    table, want = torch.full((columns,), NEVER, dtype=torch.int32), torch.zeros(HEADS, len(seen), size)
    for key in seen.nonzero().flatten().tolist():
        page = pages[key // page_size]
        table[key // page_size] = page
        pool[page, key % page_size] = torch.randn(HEADS, size).to(dtype)
        want[:, key] = pool[page, key % page_size].float()
    return pool, table, want


def read(pool, table, want, bounds, page_size, device, *, masked=True, zero=True, descriptor=False, block=16, first_key=0):
    """The tiles that hold anything, ``[HEADS, keys, block]``."""
    pool, tiles = pool.to(device), want.shape[1] // N
    out = torch.full((HEADS, tiles * N, block), torch.nan, device=device)
    page, key, head = parameters.page_strides(pool)
    code = launch.FP8_FORMATS.get(pool.dtype, 0)
    described = descriptors.descriptor(pool, N, block) if descriptor else None
    _tiles[(1,)](
        descriptors.as_bytes(pool), described, table.to(device), out, tiles, first_key, page, key, head, *bounds,
        HEADS, masked, zero, page_size, pool.shape[-1], code, N, block,
    )  # fmt: skip
    return out.cpu()


def padded(want: torch.Tensor, block: int) -> torch.Tensor:
    return torch.nn.functional.pad(want, (0, block - want.shape[2]))


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_entries_of_unseen_keys_are_not_read(page_size, name, device):
    """Entries of pages of which no key is seen. One stands for the whole tile where a page holds it: the kernel asks only for tiles it wants."""
    bounds, tiles, wanted = BOUNDS[name], KEYS // N, 5
    table = torch.randint(1, 99, (-(-KEYS // page_size),), dtype=torch.int32)
    keys = torch.arange(KEYS)
    page = keys // page_size
    seen = torch.isin(page, page[visible(bounds, KEYS)]) | torch.tensor(page_size % N == 0)
    for masked in (True, False):
        out = torch.full((KEYS,), -1, dtype=torch.int32, device=device)
        _pages[(1,)](table.to(device), out, tiles, wanted, *bounds, masked, page_size, N)
        want = torch.where((seen | torch.tensor(not masked)) & (keys < wanted * N), table[page], 0)
        assert torch.equal(out.cpu(), want), masked


@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_pages_by_pointers(page_size, name, hnd, device):
    size = 16 if hnd else 12  # 12: less than its block
    pool, table, want = paged(page_size, size, visible(BOUNDS[name], KEYS), torch.float32, hnd)
    assert torch.equal(read(pool, table, want, BOUNDS[name], page_size, device), padded(want, 16))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_tiles_without_a_mask(page_size, device):
    bounds = (0, KEYS, 0)
    pool, table, want = paged(page_size, 12, visible(bounds, KEYS), torch.float16, False)
    assert torch.equal(read(pool, table, want, bounds, page_size, device, masked=False), padded(want, 16))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("size", [16, 12])
def test_packed_keys(size, masked, device):
    """Rows lie one behind the other: the first key is anywhere, and there are no pages."""
    bounds = (21, 90, 5) if masked else (0, KEYS, 0)
    seen = visible(bounds, KEYS)
    rows = torch.randn(7 + KEYS, HEADS, size)
    rows[7:][~seen] = torch.nan
    rows[:7] = torch.nan
    want = torch.where(seen[:, None, None], rows[7:], 0.0).transpose(0, 1)
    table = torch.full((1,), NEVER, dtype=torch.int32)
    assert torch.equal(read(rows, table, want, bounds, 0, device, masked=masked, first_key=7), padded(want, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=lambda t: str(t).removeprefix("torch."))
@pytest.mark.parametrize("hnd", [False, True], ids=["nhd", "hnd"])
@pytest.mark.parametrize("name", BOUNDS)
def test_descriptors_read_what_pointers_read(name, hnd, dtype, machine, device):
    if not INTERPRETED and "tma" not in machine.features:
        pytest.skip("needs a device that copies tiles by descriptors")
    bounds = BOUNDS[name]
    for page_size, size, block in ((16, 16, 16), (48, 48, 64)):
        seen = visible(bounds, KEYS)
        pool, table, want = paged(page_size, size, seen, dtype, hnd)
        assert descriptors.describable(pool, block)
        table[table == NEVER] = 0  # an entry that is asked for is read whole
        got = read(pool, table, want, bounds, page_size, device, descriptor=True, block=block)
        assert torch.equal(got, read(pool, table, want, bounds, page_size, device, block=block))
        assert torch.equal(got, padded(want, block))
        keys = read(pool, table, want, bounds, page_size, device, descriptor=True, block=block, zero=False)
        assert torch.equal(keys[:, seen], padded(want, block)[:, seen])


@triton.jit
def _order(out_ptr, head_tiles, start_tile, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out_ptr + i, tile_of(i, head_tiles, start_tile))


@pytest.mark.parametrize(("head", "start"), [(0, 0), (0, 5), (3, 3), (2, 9)])
def test_tiles_in_reading_order(head, start, device, ints):
    out = ints([-1] * 16)
    _order[(1,)](out, head, start, 16)
    assert out.tolist() == [*range(head), *range(start, start + 16 - head)]
