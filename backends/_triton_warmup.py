"""What the Triton adapter runs to have its kernels compiled: one row over a pool of its own, for each kernel that may be needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.spec import AttentionSpec

SPANS: tuple[tuple[int, ...], ...] = ((), (0, 1), (0, 1, 0))
"""A row without spans, with one, and with one that has a group."""


def one_row(spec: AttentionSpec, device: torch.device, length: int, keys: int, span: tuple[int, ...]) -> Batch:
    """A row of ``length`` query tokens and ``keys`` keys, all query tokens in a span if there is one."""

    def ints(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    lens = ints([keys])
    return Batch(
        ints([0, length]),
        lens,
        block_table=None if spec.page_size is None else ints([list(range(-(-keys // spec.page_size)))]),
        kv_start_loc=ints([0, keys]) if spec.page_size is None else None,
        causal=torch.ones(1, dtype=torch.bool, device=device) if spec.causal == "per_sequence" else None,
        prefix_lens=lens if spec.rswa_window else None,
        query_lens_cpu=[length],
        seq_lens_cpu=[keys],
        mm_spans=[[(keys - length, keys, *span[2:])] if span else []] if spec.mm_prefix else None,
    )


def pools(spec: AttentionSpec, device: torch.device, keys: int) -> list[Tensor]:
    """Keys and values as the caller has them, laid out as the spec says."""
    place: tuple[int, ...] = (keys, spec.num_kv_heads)
    if spec.page_size is not None:
        place = (spec.page_size, spec.num_kv_heads)
        place = (-(-keys // spec.page_size), *(place[::-1] if spec.kv_layout == "HND" else place))
    return [torch.zeros((*place, size), dtype=torch.uint8, device=device).to(spec.kv_dtype) for size in (spec.head_size, spec.v_head_size)]


def layers(spec: AttentionSpec, device: torch.device) -> Iterator[LayerArgs]:
    """Per-layer inputs in the forms that kernels tell apart: sinks in fp32, and in the compute dtype."""
    scale = torch.ones(spec.num_kv_heads if spec.kv_scale == "head" else 1, device=device) if spec.kv_scale else None
    slopes = torch.zeros(spec.num_q_heads, device=device) if spec.alibi else None
    for dtype in dict.fromkeys((torch.float32, spec.dtype)) if spec.sinks else (None,):
        sinks = None if dtype is None else torch.zeros(spec.num_q_heads, dtype=dtype, device=device)
        yield LayerArgs(sinks, slopes, None, scale, scale)
