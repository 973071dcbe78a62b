"""Reading a call's keys or values from a cache of any strides: as a view where they stand together, else gathered."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attnmux.kernels.sdpa.step import KeyRun, KeySlices, Step, Work
from attnmux.kernels.sdpa.tiles import ALIGNMENT, Shape


def keys_of(step: Step, work: Work, cache: Tensor, values: bool) -> Tensor:
    """The call's keys (or values) ``[R, Hkv, w, D]`` from a cache ``[pages, page, Hkv, D]``; valid until the next call's are read."""
    strides, (_, _, heads, size) = cache.stride(), cache.shape
    source = work.sources.get((values, strides, size))
    if source is None:
        source = work.sources[values, strides, size] = locate(step.shape, work, cache)
        _land(step, work, source, heads, size, values)
    if isinstance(source, KeyRun):
        found = cache.as_strided((1, heads, work.keys, size), (0, strides[2], source.stride, 1), cache.storage_offset() + source.start)
    else:
        slices = cache.as_strided((source.last + 1, source.size), (source.step, 1), cache.storage_offset())
        torch.index_select(slices, 0, source.places, out=source.held)
        if source.fill is not None:
            source.held.view(-1, size if source.head_major else heads * size).index_fill_(0, source.fill, 0)
        found = source.found
    return found if source.wide is None else source.wide.copy_(found)


def locate(shape: Shape, work: Work, cache: Tensor) -> KeyRun | KeySlices:
    """Where the call's keys lie in ``cache [pages, page, Hkv, D]``, whatever its strides."""
    unit, heads, size = shape.unit, cache.shape[2], cache.shape[3]
    page_stride, key_stride, head_stride = cache.stride()[:3]
    starts = work.page * page_stride + work.part * (unit * key_stride)  # [R, units]
    if work.tiles == 1:
        between = starts[0].diff()
        stride = key_stride if unit > 1 or not len(between) else int(between[0])
        if stride > 0 and bool((between == unit * stride).all()):
            return KeyRun(int(starts[0, 0]) + work.skip * stride, stride)
    step = max(1, math.gcd(page_stride, key_stride, head_stride))
    if (heads == 1 or head_stride == size) and (unit == 1 or key_stride == heads * size):
        return KeySlices((starts // step).flatten(), unit * heads * size, step, head_major=False, fill=work.outside)
    places = starts[:, None, :] + torch.arange(heads)[:, None] * head_stride  # [R, Hkv, units]
    whole = unit == 1 or key_stride == size
    if not whole:
        places = places[..., None] + torch.arange(unit) * key_stride  # [R, Hkv, units, unit]
    fill = None
    if work.outside is not None:
        tile, key = (work.outside // work.keys)[:, None], (work.outside % work.keys)[:, None]
        fill = ((tile * heads + torch.arange(heads)) * work.keys + key).flatten()
    return KeySlices((places // step).flatten(), (unit if whole else 1) * size, step, head_major=True, fill=fill)


def _land(step: Step, work: Work, source: KeyRun | KeySlices, heads: int, size: int, values: bool) -> None:
    """Give the source its scratch memory, laid out as keys, keys widened, values, values widened."""
    shape, tiles = step.shape, work.tiles
    held_keys = tiles * work.page.shape[1] * shape.unit
    widened = shape.dtype != work.dtype

    def bytes_for(columns: int) -> tuple[int, int]:
        held = held_keys * heads * columns * shape.dtype.itemsize
        wide = tiles * work.keys * heads * columns * work.dtype.itemsize if widened else 0
        return _aligned(held), _aligned(wide)

    start = sum(bytes_for(shape.head_size)) if values else 0
    held, wide = bytes_for(size)
    if widened:
        region = step.scratch[start + held : start + held + wide].view(work.dtype)
        source.wide = region[: tiles * heads * work.keys * size].view(tiles, heads, work.keys, size)
    if isinstance(source, KeySlices):
        region = step.scratch[start : start + held].view(shape.dtype)[: held_keys * heads * size]
        source.held = region.view(-1, source.size)
        own = slice(work.skip, work.skip + work.keys)
        whole = region.view(tiles, heads, -1, size) if source.head_major else region.view(tiles, -1, heads, size).transpose(1, 2)
        source.found = whole[:, :, own]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
