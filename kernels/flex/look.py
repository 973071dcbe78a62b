"""What FlexAttention is told of a spec: :class:`Look`, its mask and score modification, and the one call that uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from attnmux.kernels.masks import Sight


@dataclass(frozen=True, slots=True)
class Look:
    """All that a compiled kernel depends on. No length is among it.

    Args:
        sight: which keys a token sees.
        causal: ``None`` where each row says so itself.
        page_size: keys of a block; it is the KV block of the block mask.
        scale, softcap, alibi: as in the specification.
    """

    sight: Sight
    causal: bool | None
    page_size: int
    scale: float
    softcap: float | None = None
    alibi: Literal["linear", "sqrt"] | None = None


class Tables(NamedTuple):
    """What masks look up; all int32 but ``causal``. ``T`` tiles, ``R`` rows, ``B`` blocks of the keys given.

    Args:
        row: ``[T]``, the tile's row.
        first: ``[T]``, position of the tile's first token.
        seq_len: ``[R]``.
        causal: bool ``[R]``, where each row has its own.
        prefix_len: ``[R]``, for R-SWA.
        family: ``[R, positions]``, which span, or group of spans, holds a position; -1 is none.
        logical: ``[R, B]``, where a block stands in a row; -1 where the row does not read it.
        num_blocks: ``[T, 1, 1]``, blocks that a tile reads.
        blocks: ``[T, 1, 1, most]``, which ones.
    """

    row: Tensor
    first: Tensor
    seq_len: Tensor
    causal: Tensor | None
    prefix_len: Tensor | None
    family: Tensor | None
    logical: Tensor
    num_blocks: Tensor
    blocks: Tensor


_Mod = Callable[..., Tensor]


def mask_of(look: Look, tables: Tables, spread: int) -> _Mod:
    """``mask_mod(b, h, m, n)``: whether token ``m`` of tile ``b`` sees the key at place ``n``."""
    sight = look.sight

    def mask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        row = tables.row[b]
        q_pos = tables.first[b] + m
        k_pos, inside = _position(look, tables, spread, row, n)
        inside = inside & (k_pos < tables.seq_len[row])
        if not sight.positions:
            return inside
        d = q_pos - k_pos
        if sight.rswa_window is not None:
            assert tables.prefix_len is not None
            return inside & (d >= 0) & ((k_pos < tables.prefix_len[row]) | (d < sight.rswa_window))
        ahead = _ahead(look, tables, row, d)
        recent = _recent(sight, q_pos, k_pos)
        if sight.mm_prefix is None:
            return inside & ahead & recent
        span = _same_span(cast(Tensor, tables.family), row, q_pos, k_pos, tables.seq_len[row] - 1)
        return inside & ((ahead & recent) | span) if sight.mm_prefix == "override_window" else inside & (ahead | span) & recent

    return mask


def score_of(look: Look, tables: Tables, spread: int, slopes: Tensor | None) -> _Mod | None:
    """``score_mod``: softcap, then ALiBi; ``None`` where the spec has neither."""
    if look.softcap is None and look.alibi is None:
        return None

    def modified(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        if look.softcap is not None:
            score = look.softcap * torch.tanh(score / look.softcap)
        if look.alibi is not None:
            assert slopes is not None
            k_pos, _ = _position(look, tables, spread, tables.row[b], n)
            d = (tables.first[b] + m - k_pos).to(torch.float32)
            score = score - slopes[h] * (d.abs() if look.alibi == "linear" else d.clamp(min=0).sqrt())
        return score

    return modified


def _position(look: Look, tables: Tables, spread: int, row: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Position in the row of the key at place ``n``, and whether the row reads its block. Blocks lie ``spread`` apart."""
    block = n // look.page_size
    logical = tables.logical[row, block // spread]
    inside = logical >= 0
    if spread > 1:  # between the blocks lies something else, the other cache for example
        inside = inside & (block % spread == 0)
    return logical.clamp(min=0) * look.page_size + n % look.page_size, inside


def _ahead(look: Look, tables: Tables, row: Tensor, d: Tensor) -> Tensor:
    """The bound to the right."""
    causal = d >= 0
    if look.causal is True:
        return causal
    reach = look.sight.reach
    free = torch.ones_like(causal) if reach is None else -d <= reach
    return free if look.causal is False else causal | (free & ~cast(Tensor, tables.causal)[row])


def _recent(sight: Sight, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The bounds to the left."""
    recent = torch.ones_like(q_pos - k_pos, dtype=torch.bool)
    if sight.window is not None:
        recent = recent & (q_pos - k_pos < sight.window)
    if sight.chunk is not None:
        size, lookback = sight.chunk
        recent = recent & (q_pos // size - k_pos // size <= lookback)
    return recent


def _same_span(family: Tensor, row: Tensor, q_pos: Tensor, k_pos: Tensor, last: Tensor) -> Tensor:
    """Beyond the row's ``last`` key are padding tokens and keys that are masked anyway; they must not index beyond the table."""
    seen_from = family[row, torch.minimum(q_pos, last)]
    return (seen_from >= 0) & (seen_from == family[row, torch.minimum(k_pos, last)])


def attend(
    look: Look, spread: int, q: Tensor, k: Tensor, v: Tensor, tables: Tables, slopes: Tensor | None, options: dict[str, Any] | None
) -> tuple[Tensor, Tensor]:
    """One call of FlexAttention.

    Args:
        look, spread: what is compiled in.
        q: ``[T, Hq, tile, D]``.
        k, v: ``[1, Hkv, places, D]``.
        tables: see :class:`Tables`.
        slopes: float32 ``[Hq]``.
        options: kernel options.

    Returns:
        ``out [T, Hq, tile, Dv]`` and the natural log-sum-exp, float32 ``[T, Hq, tile]``.
    """
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        kv_num_blocks=tables.num_blocks,
        kv_indices=tables.blocks,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=None,  # the transposed lists are for gradients
        q_indices=None,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(q.shape[2], look.page_size),
        mask_mod=mask_of(look, tables, spread),
    )
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_of(look, tables, spread, slopes),
        block_mask=mask,
        scale=look.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=cast(Any, options),
        return_aux=AuxRequest(lse=True),
    )
    return out, cast(Tensor, aux.lse)
