"""Inputs of a run that only makes kernels be compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.spec import AttentionSpec


def zeros_of(spec: AttentionSpec, device: torch.device, seqs: int, length: int, keys: int) -> tuple[Batch, Tensor, tuple[Tensor, Tensor]]:
    """So many rows over the same keys, one with ``length`` query tokens and so many keys, the others with one each.

    Returns:
        The batch, ``q``, and both pools.
    """
    lens, kv_lens = ([first] + [1] * (seqs - 1) for first in (length, keys))
    page = spec.page_size or 1
    pages = -(-keys // page)

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def running(values: list[int]) -> Tensor:
        return torch.tensor([0, *values]).cumsum(0).to(device=device, dtype=torch.int32)

    batch = Batch(running(lens), ints(kv_lens), query_lens_cpu=lens, seq_lens_cpu=kv_lens)
    place: tuple[int, ...] = (sum(kv_lens), spec.num_kv_heads)
    if spec.page_size is None:
        batch.kv_start_loc = running(kv_lens)
    else:
        batch.block_table = ints(list(range(pages))).repeat(seqs, 1)  # not expanded: strides of 0 make another kernel
        inner = (page, spec.num_kv_heads)
        place = (pages, *(inner[::-1] if spec.kv_layout == "HND" else inner))
    pools = tuple(torch.zeros((*place, size), dtype=spec.dtype, device=device) for size in (spec.head_size, spec.v_head_size))
    q = torch.zeros((sum(lens), spec.num_q_heads, spec.head_size), dtype=spec.dtype, device=device)
    return batch, q, (pools[0], pools[1])
