"""The oracle: dense attention in plain torch, row by row, on any device.

Slow and plain on purpose: every visible score exists at once, in float32 or float64. It follows the definitions word by
word (scale, softcap, ALiBi, mask, softmax with the sink in its denominator); the masks are in :mod:`attnmux.kernels.masks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

from attnmux.kernels.masks import UNBOUNDED, Sight, Span

MAX_SCORES = 2**23
"""Scores held at once; a row with more is computed by blocks of query tokens, cut by the row's own lengths alone."""


def reference_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: Tensor | None = None,
    kv_start_loc: Tensor | None = None,
    kv_layout: Literal["NHD", "HND"] = "NHD",
    scale: float,
    causal: bool | Sequence[bool] = True,
    sight: Sight = UNBOUNDED,
    spans: Sequence[Sequence[Span]] | None = None,
    prefix_lens: Sequence[int] | None = None,
    softcap: float | None = None,
    alibi: Literal["linear", "sqrt"] | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_scale: Tensor | float | None = None,
    k_scale: Tensor | float | None = None,
    v_scale: Tensor | float | None = None,
    compute_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every row over its pages or packed keys.

    Args:
        q: ``[tokens, Hq, D]``; tokens beyond the rows' are left alone.
        k_cache, v_cache: ``[pages, page, Hkv, D]`` (NHD), ``[pages, Hkv, page, D]`` (HND), or packed ``[kv_tokens, Hkv, D]``
            when there is no block table. Any strides, any dtype, fp8 included.
        query_lens, seq_lens: query tokens and keys of each row; token ``i`` sits at position ``seq_len - q_len + i``.
        block_table: int ``[seqs, cols]``; read only where some token of the row sees a key.
        kv_start_loc: int ``[seqs + 1]``, first key of each row in packed caches.
        scale: multiplies ``q.k``.
        causal: for all rows, or one a row.
        sight: which keys a token sees.
        spans: multimodal spans of each row, for ``sight.mm_prefix``.
        prefix_lens: for ``sight.rswa_window``.
        softcap: ``c`` of ``c * tanh(score / c)``.
        alibi: ``"linear"`` (``-slope * |d|``) or ``"sqrt"`` (``-slope * sqrt(d)``, 0 where ``d < 0``), with ``alibi_slopes [Hq]``.
        sinks: ``[Hq]``, one more logit in each softmax denominator.
        q_scale, k_scale, v_scale: true value = stored value * scale; a number, ``[]``, or one a KV head ``[Hkv]``.
        compute_dtype: float32 or float64.
        out, lse: where to write ``[tokens, Hq, Dv]`` and ``[tokens, Hq]``; by default new ones in ``compute_dtype``, 0 and ``-inf``.

    Returns:
        ``(out, lse)``; a token that sees nothing has 0 and ``-inf`` (or the sink). LSE is natural and includes the sink.
    """
    shape = (q.shape[0], q.shape[1], v_cache.shape[-1])
    out = torch.zeros(shape, dtype=compute_dtype, device=q.device) if out is None else out
    lse = torch.full(shape[:2], -torch.inf, dtype=compute_dtype, device=q.device) if lse is None else lse
    token = 0
    with full_precision():
        for row, (q_len, kv_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
            places = _places(k_cache, block_table, kv_start_loc, row, kv_layout)
            step = max(1, MAX_SCORES // (q.shape[1] * max(kv_len, 1)))
            for start in range(0, q_len, step):
                tokens = slice(token + start, token + min(start + step, q_len))
                q_pos = kv_len - q_len + torch.arange(start, min(start + step, q_len), device=q.device)[:, None]  # [n, 1]
                mask = sight.mask(
                    q_pos,
                    torch.arange(kv_len, device=q.device)[None, :],
                    causal if isinstance(causal, bool) else bool(causal[row]),
                    kv_len,
                    () if spans is None else spans[row],
                    0 if prefix_lens is None else prefix_lens[row],
                )  # [n, kv_len]
                seen = mask.any(0).nonzero()[:, 0]  # [m]: nothing else is read
                keys = _gather(k_cache, places(seen), kv_layout, k_scale, compute_dtype)  # [m, Hkv, D]
                values = _gather(v_cache, places(seen), kv_layout, v_scale, compute_dtype)  # [m, Hkv, Dv]
                scores = _scores(_widen(q[tokens], q_scale, compute_dtype), keys) * scale  # [Hq, n, m]
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi is not None and alibi_slopes is not None:
                    scores = scores - alibi_slopes.to(compute_dtype)[:, None, None] * alibi_distance(q_pos, seen[None, :], alibi, compute_dtype)
                scores = scores.masked_fill(~mask[:, seen], -torch.inf)
                out[tokens], lse[tokens] = _softmax(scores, values, sinks)
            token += q_len
    return out, lse


def alibi_distance(q_pos: Tensor, k_pos: Tensor, alibi: Literal["linear", "sqrt"], dtype: torch.dtype) -> Tensor:
    """What ALiBi's slope multiplies, for positions that broadcast: ``|d|``, or ``sqrt(d)`` and 0 where ``d < 0``."""
    distance = (q_pos - k_pos).to(dtype)
    return distance.abs() if alibi == "linear" else distance.clamp(min=0).sqrt()


def _places(
    k_cache: Tensor, block_table: Tensor | None, kv_start_loc: Tensor | None, row: int, kv_layout: str
) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """From key positions of the row to the indices that read them."""
    if kv_start_loc is not None:
        return lambda seen: (kv_start_loc[row].long() + seen,)
    if block_table is None:
        raise TypeError("keys need a block_table, or kv_start_loc where they are packed")
    size = k_cache.shape[1 if kv_layout == "NHD" else 2]
    return lambda seen: (block_table[row, seen // size].long(), seen % size)


def _gather(cache: Tensor, places: tuple[Tensor, ...], kv_layout: str, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """``[m, Hkv, D]`` in ``dtype``, scaled."""
    fp8 = cache.dtype.itemsize == 1
    pool = cache.view(torch.uint8) if fp8 else cache  # indexing lacks fp8 on some devices; bytes move the same
    if len(places) == 1 or kv_layout == "NHD":
        found = pool[places]
    else:
        found = pool[places[0], :, places[1]]
    return _widen(found.view(cache.dtype) if fp8 else found, scale, dtype)


def _widen(stored: Tensor, scale: Tensor | float | None, dtype: torch.dtype) -> Tensor:
    """``[n, heads, size]`` in ``dtype`` times its scale, always a fresh contiguous copy: no bit may depend on where it lay."""
    wide = stored.to(torch.float32 if stored.dtype.itemsize == 1 else dtype, copy=True).to(dtype).contiguous()
    if scale is None:
        return wide
    if isinstance(scale, Tensor):
        scale = scale.to(dtype)
        if scale.dim() == 1:
            scale = scale.repeat_interleave(wide.shape[1] // scale.shape[0])[:, None]
    return wide * scale


def _scores(q: Tensor, keys: Tensor) -> Tensor:
    """``q.k`` as ``[Hq, n, m]``; the query heads of a KV head stand together."""
    n, num_q_heads, size = q.shape
    num_kv_heads = keys.shape[1]
    grouped = q.transpose(0, 1).reshape(num_kv_heads, num_q_heads // num_kv_heads * n, size)
    return (grouped @ keys.permute(1, 2, 0)).view(num_q_heads, n, keys.shape[0])


def _softmax(scores: Tensor, values: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(out [n, Hq, Dv], lse [n, Hq])`` of masked scores ``[Hq, n, m]``; ``m`` may be 0."""
    num_q_heads, n, m = scores.shape
    num_kv_heads = values.shape[1]
    sink = torch.full((num_q_heads,), -torch.inf, dtype=scores.dtype, device=scores.device) if sinks is None else sinks.to(scores.dtype)
    lse = torch.cat((scores, sink[:, None, None].expand(-1, n, 1)), -1).logsumexp(-1)  # [Hq, n]
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    out = weights.view(num_kv_heads, num_q_heads // num_kv_heads * n, m) @ values.transpose(0, 1)
    return out.view(num_q_heads, n, values.shape[2]).transpose(0, 1), lse.transpose(0, 1)


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 means fp32, whatever the process allows elsewhere."""
    allowed = torch.get_float32_matmul_precision()
    if allowed == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)
