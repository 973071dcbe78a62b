"""One layer of a prepared batch: gather keys, run torch's fused CPU kernel, merge by log-sum-exp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmux.kernels.sdpa.keys import keys_of
from attnmux.kernels.sdpa.step import Segment, Step, Work

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def run_step(
    step: Step,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> None:
    """Attention of one layer into ``out`` (and ``lse``); tokens beyond the batch's are left alone.

    Args:
        step: from :func:`attnmux.kernels.sdpa.step.prepare`.
        q: ``[tokens, Hq, D]``.
        k_cache, v_cache: ``[pages, page, Hkv, D]`` (NHD), ``[pages, Hkv, page, D]`` (HND) or packed ``[kv_tokens, Hkv, D]``.
        out: ``[tokens, Hq, Dv]``.
        lse: float32 ``[tokens, Hq]`` or ``None``.
        sinks: ``[Hq]``.
        alibi_slopes: float32 ``[Hq]``.
    """
    keys, values = (_as_pages(cache, step.kv_layout) for cache in (k_cache, v_cache))
    for segment in step.segments:
        found_out, found_lse = _segment(step, segment, q, keys, values, alibi_slopes)
        if sinks is not None:
            found_out, found_lse = _add_sinks(found_out, found_lse, sinks.float())
        out[segment.lo : segment.hi] = found_out
        if lse is not None:
            lse[segment.lo : segment.hi] = found_lse


def _as_pages(cache: Tensor, kv_layout: str) -> Tensor:
    """Any cache as ``[pages, page, Hkv, D]``, a view."""
    paged = cache.unsqueeze(1) if cache.dim() == 3 else cache
    return paged if kv_layout == "NHD" else paged.transpose(1, 2)


def _segment(step: Step, segment: Segment, q: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(out [n, Hq, Dv], lse [n, Hq])`` of the segment's tokens, without sinks."""
    acc: tuple[Tensor, Tensor] | None = None
    for part in segment.parts:
        results = [_attend(step, work, q, keys, values, slopes) for work in part.works]
        outs, lses = results[0] if len(results) == 1 else (torch.cat([r[0] for r in results]), torch.cat([r[1] for r in results]))
        if acc is None and part.index is None:
            acc = outs, lses
        elif acc is None and part.once and part.index is not None:
            acc = _nothing(step, segment)
            acc[0].index_copy_(0, part.index, outs.float())
            acc[1].index_copy_(0, part.index, lses)
        else:
            acc = merge(*(acc or _nothing(step, segment)), outs, lses, part.index)
    return acc or _nothing(step, segment)


def _nothing(step: Step, segment: Segment) -> tuple[Tensor, Tensor]:
    """The results of tokens that see no keys."""
    n, heads = segment.hi - segment.lo, step.shape.num_q_heads
    return torch.zeros(n, heads, step.shape.v_head_size), torch.full((n, heads), -torch.inf)


def merge(acc_out: Tensor, acc_lse: Tensor, outs: Tensor, lses: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add partial results to those of some tokens.

    Args:
        acc_out, acc_lse: ``[n, Hq, Dv]`` and float32 ``[n, Hq]``.
        outs, lses: ``[m, Hq, Dv]`` and float32 ``[m, Hq]``; ``-inf`` marks a result over no keys, whose output is finite.
        index: int64 ``[m]``, the token of each result; ``None``: one each, in order.

    Source: the online softmax of Milakov and Gimelshein (2018), as FlashDecoding splits it; here each token has any number of results.
    """
    if index is None:
        index = torch.arange(outs.shape[0])
    top = acc_lse.scatter_reduce(0, index[:, None].expand_as(lses), lses, "amax")
    base = torch.where(top == -torch.inf, 0.0, top)  # nothing seen yet: weigh exp(-inf - 0) = 0
    old, new = torch.exp(acc_lse - base), torch.exp(lses - base[index])
    total = old.index_add(0, index, new)
    merged = (acc_out.float() * old[..., None]).index_add_(0, index, outs.float() * new[..., None])
    return merged.div_(torch.where(total == 0, 1.0, total)[..., None]), base + torch.log(total)


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Put one logit a head into the denominator."""
    whole = torch.logaddexp(lse, sinks)
    return out * torch.exp(lse - torch.where(whole == -torch.inf, 0.0, whole))[..., None], whole


def _attend(step: Step, work: Work, q: Tensor, keys: Tensor, values: Tensor, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """``(out [R * n, Hq, Dv], lse [R * n, Hq])`` of one call."""
    shape, tiles, n = step.shape, work.tiles, work.q_len
    query = _queries(step, work, q)
    key, value = keys_of(step, work, keys, False), keys_of(step, work, values, True)
    if shape.head_size != shape.v_head_size:  # the kernel takes one head size; columns of 0 change no score and no value
        size = max(shape.head_size, shape.v_head_size)
        query, key, value = (F.pad(t, (0, size - t.shape[-1])) for t in (query, key, value))
    bias = work.mask if work.distance is None else _alibi(work, slopes, shape.num_kv_heads)
    if step.scale < 0:  # the kernel masks a square before it scales: -inf times a negative number would be what is seen
        query = -query
    out, lse = _flash(query, key, value, 0.0, work.square, attn_mask=bias, scale=abs(step.scale))
    if shape.v_head_size < shape.head_size:
        out = out[..., : shape.v_head_size]
    if not work.folded:
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    elif n > 1:
        out = out.unflatten(2, (n, shape.group)).transpose(1, 2)  # [R, n, Hkv, G, Dv]
        lse = lse.unflatten(2, (n, shape.group)).transpose(1, 2)
    out, lse = out.reshape(tiles * n, shape.num_q_heads, shape.v_head_size), lse.reshape(tiles * n, shape.num_q_heads)
    return out, lse if work.blind is None else lse.masked_fill(work.blind, -torch.inf)  # the kernel says 0 for a token that sees nothing


def _queries(step: Step, work: Work, q: Tensor) -> Tensor:
    """``[R, Hq, n, D]``, folded ``[R, Hkv, n * G, D]``."""
    shape, tiles, n = step.shape, work.tiles, work.q_len
    chosen = q[work.span[0] : work.span[1]] if work.span else q.index_select(0, work.tokens)
    if chosen.dtype != work.dtype:
        chosen = chosen.to(work.dtype)
    if not work.folded:
        return chosen.reshape(tiles, n, shape.num_q_heads, shape.head_size).transpose(1, 2)
    if n == 1:
        return chosen.reshape(tiles, shape.num_kv_heads, shape.group, shape.head_size)
    grouped = chosen.reshape(tiles, n, shape.num_kv_heads, shape.group, shape.head_size)
    return grouped.transpose(1, 2).reshape(tiles, shape.num_kv_heads, n * shape.group, shape.head_size)


def _alibi(work: Work, slopes: Tensor | None, num_kv_heads: int) -> Tensor:
    """``mask - slope * distance``: ``[R, Hq, n, w]``, folded ``[R, Hkv, n * G, w]``."""
    assert slopes is not None and work.mask is not None and work.distance is not None
    if not work.folded:
        return torch.addcmul(work.mask, work.distance, slopes[:, None, None], value=-1)
    return torch.addcmul(work.mask, work.distance, slopes.view(num_kv_heads, 1, -1, 1), value=-1).flatten(2, 3)
