"""Tensor descriptors of the pools of keys and values, by which targets that can copy whole tiles."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnmux.kernels.triton.arguments import FP8_FORMATS, Features, Rows, Work
from attnmux.kernels.triton.config import described, power_of_two

Descriptors = tuple[TensorDescriptor | None, TensorDescriptor | None]
"""Of keys and of values; ``None`` where the launch reads by pointers."""


def descriptors(k: Tensor, v: Tensor, size: int, v_size: int, rows: Rows, work: Work, features: Features) -> Descriptors:
    """Tensor descriptors of the pools, if a page holds the tile and they can be described; for targets that read by them."""
    if not described(work.config, features.page_size):
        return None, None
    if rows.groups:  # Triton 3.6 reads wrong tiles by them in the loop over spans, which isn't pipelined
        return None, None
    block_d, block_dv = power_of_two(size), power_of_two(v_size)
    if not (describable(k, block_d) and describable(v, block_dv)):
        return None, None
    return descriptor(k, work.config.block_n, block_d), descriptor(v, work.config.block_n, block_dv)


def describable(cache: Tensor, block: int) -> bool:
    """Whether a tensor descriptor can stand for the pages: everything on 16 bytes, and at most 256 elements a row."""
    places = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:3]))
    return block <= 256 and all(place % 16 == 0 for place in places)


def descriptor(cache: Tensor, block_n: int, block: int) -> TensorDescriptor:
    """The pages as ``[pages, Hkv, page, SIZE]``, whatever their layout, of which a load takes ``block_n`` keys of one head."""
    view = as_bytes(cache).transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, block_n, block])


def as_bytes(cache: Tensor) -> Tensor:
    """What kernels take for fp8, which not every target knows."""
    return cache.view(torch.uint8) if cache.dtype in FP8_FORMATS else cache
