"""What launches take: the layers' attention as constants, a step's rows, lengths and cut, and a layer's own tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmux.kernels.triton.call import Held
from attnmux.kernels.triton.config import LaunchConfig

FP8_FORMATS: dict[torch.dtype, int] = {
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
    torch.float8_e4m3fnuz: 13,
    torch.float8_e5m2fnuz: 12,
}
"""Formats as ``decode_fp8`` takes them."""


@dataclass(frozen=True, slots=True)
class Features:
    """What the layer's attention is, as the kernel's constants.

    Args:
        scale: of ``q.k``.
        causal: 0 no, 1 yes, 2 per row.
        window, window_right: keys to the left, itself included (0: none), and to the right where not causal.
        chunk, lookback: chunked attention (0: none).
        spans: 0 none, 1 override_window, 2 within_window.
        rswa: window of R-SWA (0: none).
        alibi: 0 none, 1 linear, 2 sqrt.
        softcap: 0 none.
        scale_by_head: whether k_scale and v_scale hold one value a KV head.
        dtype: the compute dtype.
        page_size: 0 for packed keys.
        fp8_native: whether the target converts the cache's fp8 format itself; otherwise bytes are decoded with integer operations.
        descriptors: whether the target copies tiles by tensor descriptors (TMA); taken where a page holds a tile.
        registers: of a multiprocessor, where the target's compiler takes a bound for a thread (NVIDIA's); 0: it does not.
        dependents: whether the target launches a kernel while the one before still runs (programmatic dependent launch).
    """

    scale: float
    dtype: torch.dtype
    page_size: int
    causal: int = 1
    window: int = 0
    window_right: int = 0
    chunk: int = 0
    lookback: int = 0
    spans: int = 0
    rswa: int = 0
    alibi: int = 0
    softcap: float = 0.0
    scale_by_head: bool = False
    fp8_native: bool = False
    descriptors: bool = False
    registers: int = 0
    dependents: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One launch of a step: which rows, its cut into items (written on the device by ``plan``), and room for partial states.

    Args:
        lens: least and most query tokens of the rows that are meant.
        first, tiles, cuts, items, count, merges: see ``plan_step``.
        slot_out, slot_lse: float32 ``[slots, Hkv, BLOCK_M, Dv]`` and ``[slots, Hkv, BLOCK_M]``.
        config: tile shape.
        room: items of one KV head that the device holds at once.
        cut_tiles: 0, or how many tiles a part has wherever the row is in the batch.
        held: its compiled kernels.
    """

    lens: tuple[int, int]
    first: Tensor
    tiles: Tensor
    cuts: Tensor
    items: Tensor
    count: Tensor
    merges: Tensor
    slot_out: Tensor
    slot_lse: Tensor
    config: LaunchConfig
    room: int
    cut_tiles: int
    held: Held = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rows:
    """What kernels read of a step's rows, contiguous but for the table's rows; see ``paged_attention`` for shapes. Tensors may be longer than
    there are rows.
    """

    table: Tensor
    prefix_lens: Tensor | None = None
    causal: Tensor | None = None
    row_span_start: Tensor | None = None
    row_spans: Tensor | None = None
    groups: bool = False

    def masks(self) -> tuple[Tensor | None, ...]:
        """What tells who sees whom."""
        return self.prefix_lens, self.causal, self.row_span_start, self.row_spans


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long a step's ``seqs`` rows are, contiguous; see ``plan_step`` for shapes."""

    seqs: int
    query_start_loc: Tensor
    seq_lens: Tensor


class Layer(NamedTuple):
    """Per-layer inputs on the device; scales are float32 ``[1]`` or ``[Hkv]``."""

    sinks: Tensor | None = None
    slopes: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def form(self) -> tuple[Any, ...]:
        """What kernels are compiled for: which are there, and the sinks' dtype."""
        sinks, slopes, q_scale, k_scale, v_scale = self
        return sinks is not None and sinks.dtype, slopes is None, q_scale is None, k_scale is None, v_scale is None
