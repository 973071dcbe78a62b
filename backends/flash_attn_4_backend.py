"""The adapter of FlashAttention-4, at the level of the function behind its public ones, which takes ``out``, ``lse`` and a tile."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flash_attn_base import FlashAttnBackend
from attnmux.backends._flash_attn_step import PACKED_PAGE, Step
from attnmux.backends._flash_attn_warmup import zeros_of
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits

LOADERS = 128
"""Threads that load keys and values, 16 bytes each at a time."""
LOOKUP_SEQS = 256
"""With more rows the library looks rows up through a table, with other kernels."""


class FlashAttn4Backend(FlashAttnBackend):
    """Compiled in this process at first use, 5 to 30 seconds a kernel. What tells kernels apart within a spec: the sinks' dtype, whether there are
    more than 256 rows, and on Blackwell whether rows are short. Set ``FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1`` to keep kernels on disk.
    """

    def __init__(self, spec: AttentionSpec, device: Device, options: Mapping[str, Any]) -> None:
        super().__init__(spec, device, options)
        library = importlib.import_module("flash_attn.cute.interface")
        self._forward = library._flash_attn_fwd
        self._hopper = device.arch.startswith("sm9")
        self._tile: dict[str, Any] = {}
        if self._hopper:
            own = library._tile_size_fwd_sm90(spec.head_size, spec.v_head_size, spec.causal is True, spec.sliding_window is not None)
            keys = key_tile(own.n_block_size, spec.head_size, spec.v_head_size, spec.page_size or PACKED_PAGE)
            if keys != own.n_block_size:
                self._tile = {
                    "tile_mn": (own.m_block_size, keys),
                    "mma_pv_is_rs": own.mma_pv_is_rs,
                    "intra_wg_overlap": own.intra_wg_overlap,
                }

    def warmup(self, limits: Limits) -> None:
        """Compile each kernel that the limits can reach."""
        longest = limits.max_query_len if self.spec.attn_type == "cross" else min(limits.max_query_len, limits.max_seq_len)
        longest = min(longest, 4 * LOADERS)
        lengths = {longest} if self._hopper else {min(longest, n) for n in (1, MAX_DECODE_TOKENS, longest)}
        counts = {1, LOOKUP_SEQS + 1} if limits.max_num_seqs > LOOKUP_SEQS else {1}
        dtypes = dict.fromkeys((torch.float32, self.spec.dtype)) if self.spec.sinks else (None,)
        for length in sorted(lengths):
            for seqs in sorted(counts):
                batch, q, pools = zeros_of(self.spec, self._torch_device, seqs, length, min(length, limits.max_seq_len))
                out = torch.empty((q.shape[0], self.spec.num_q_heads, self.spec.v_head_size), dtype=self.spec.dtype, device=q.device)
                lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device) if self.spec.return_lse else None
                step = self.plan(batch, None, None)
                for dtype in dtypes:
                    sinks = None if dtype is None else torch.zeros(self.spec.num_q_heads, dtype=dtype, device=q.device)
                    self.run(q, *pools, step, out, lse, LayerArgs(sinks))

    def _extend(self, step: Step, batch: Batch) -> None:
        """Its scheduler reads row starts and key lengths on the device in each launch."""

    def _takes_sinks(self, sinks: Tensor) -> bool:
        return True

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, step: Step, out: Tensor, sinks: Tensor | None, wants_lse: bool, own: bool
    ) -> Tensor | None:
        spec, (left, right) = self.spec, self._window
        lse = torch.empty((spec.num_q_heads, q.shape[0]), dtype=torch.float32, device=q.device) if wants_lse else None
        windowed = spec.sliding_window is not None
        self._forward(
            q,
            k,
            v,
            cu_seqlens_q=step.starts,
            seqused_k=step.lens,
            # on Hopper it would only multiply kernels; on Blackwell it chooses the tile and the split
            max_seqlen_q=None if self._hopper else step.max_query_len,
            page_table=table,
            softmax_scale=spec.scale,
            causal=spec.causal is True,
            softcap=spec.softcap,
            window_size_left=left if windowed else None,
            window_size_right=right if windowed and not spec.causal else None,
            learnable_sink=sinks.float() if sinks is not None and sinks.dtype == torch.float64 else sinks,
            # Hopper has no split; split rows of other value sizes get key tiles of 64, which a page may equal
            num_splits=1 if self._hopper or spec.head_size != spec.v_head_size else 0,
            return_lse=wants_lse,
            out=out,
            lse=lse,
            **self._tile,
        )
        return lse


def key_tile(own: int, head_size: int, v_head_size: int, page: int) -> int:
    """Keys of a tile on Hopper: the library's own number, or the next below it that is right for pages.

    A page as long as the tile would be loaded by TMA, dirty memory behind a row's last key included. Other pages are loaded row by row, so
    many rows at a time, without a check for the tile's end: a tile that is no multiple would spill into the memory beside it (head sizes
    80 and 96 without a causal mask).
    """
    rows = LOADERS // (math.gcd(head_size, v_head_size, 64) // 8)
    tile = own // rows * rows
    return tile - rows if tile == page else tile
