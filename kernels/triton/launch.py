"""Launching the kernels on tensors. Inputs are taken as checked; nothing here synchronises."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnmux.kernels.triton.arguments import FP8_FORMATS, Features, Layer, Lengths, Rows, Work
from attnmux.kernels.triton.attention import paged_attention
from attnmux.kernels.triton.call import call, capturing, described_by, on
from attnmux.kernels.triton.combine import combine, merge
from attnmux.kernels.triton.config import described, power_of_two
from attnmux.kernels.triton.plan import CUT, ITEM, plan_step
from attnmux.kernels.triton.write import write_cache

__all__ = ["CUT", "FP8_FORMATS", "ITEM", "Features", "Layer", "Lengths", "Rows", "Work", "attend", "capturing", "merge_states", "plan", "store"]

LANES = 256
"""Rows, units or items that the plan looks at side by side."""

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def plan(rows: Rows, lens: Lengths, work: Work, features: Features, group: int) -> None:
    """Cut a step: write the tables of ``work`` from the lengths on the device. One small launch.

    Args:
        rows, lens, work, features: the step, its lengths, its tables, and the layers' attention.
        group: query heads a KV head.
    """

    def fixed() -> dict[str, Any]:
        return {
            "seqs": lens.seqs,
            "max_units": work.tiles.shape[0],
            "max_items": work.items.shape[0],
            "max_merges": work.merges.shape[0],
            "room": work.room,
            "least_len": work.lens[0],
            "most_len": work.lens[1],
            **_mask(features, rows),
            "CUT_TILES": work.cut_tiles,
            "LEAST": work.config.part,
            "BLOCK_Q": work.config.block_m // group,
            "BLOCK_N": work.config.block_n,
            "L": LANES,
            "num_warps": 8,
        }

    changing = {
        "query_start_ptr": lens.query_start_loc,
        "seq_lens_ptr": lens.seq_lens,
        "prefix_lens_ptr": rows.prefix_lens,
        "causal_ptr": None if rows.causal is None else rows.causal.view(torch.uint8),
        "row_span_start_ptr": rows.row_span_start,
        "row_spans_ptr": rows.row_spans,
        "first_ptr": work.first,
        "tiles_ptr": work.tiles,
        "cuts_ptr": work.cuts,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "merges_ptr": work.merges,
    }
    with on(lens.seq_lens.device):
        call(work.held, ("plan", lens.seqs, rows.row_spans is None, rows.groups), plan_step, (1,), changing, fixed)


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, rows: Rows, work: Work, features: Features, layer: Layer) -> None:
    """Attention of one launch into ``out`` and ``lse``.

    Args:
        q: ``[tokens, Hq, D]``.
        k, v: ``[pages, page, Hkv, D]`` (any strides, last dimension contiguous), or packed ``[kv_tokens, Hkv, D]``.
        out: ``[tokens, Hq, Dv]``; lse: float32 ``[tokens, Hq]``, contiguous, or ``None``.
        rows, work, features, layer: the step, its cut as ``plan`` wrote it, and the layer.
    """
    with on(q.device):
        _attend(q, k, v, out, lse, rows, work, features, layer)
        if work.slot_lse.shape[0]:
            _combine(q, k, out, lse, work, features, layer)


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, rows: Rows, work: Work, features: Features, layer: Layer) -> None:
    config, kv_heads = work.config, k.shape[-2]
    block_d, block_dv = power_of_two(q.shape[2]), power_of_two(out.shape[2])
    by_descriptors = features.descriptors and described(config, features.page_size)
    by_descriptors = by_descriptors and not rows.groups  # Triton 3.6 reads wrong tiles by them in the loop over spans, which isn't pipelined
    by_descriptors = by_descriptors and describable(k, block_d) and describable(v, block_dv)
    scales = layer.q_scale, layer.k_scale, layer.v_scale

    def fixed() -> dict[str, Any]:
        (k_page, k_key, k_head), (v_page, v_key, v_head) = _strides(k), _strides(v)
        return {
            "stride_q_token": q.stride(0),
            "stride_q_head": q.stride(1),
            "stride_k_page": k_page,
            "stride_k_key": k_key,
            "stride_k_head": k_head,
            "stride_v_page": v_page,
            "stride_v_key": v_key,
            "stride_v_head": v_head,
            "stride_out_token": out.stride(0),
            "stride_out_head": out.stride(1),
            "stride_table": rows.table.stride(0),
            "scale": features.scale,
            "softcap": features.softcap,
            "KV_HEADS": kv_heads,
            "GROUP": q.shape[1] // kv_heads,
            "HEAD_SIZE": q.shape[2],
            "V_HEAD_SIZE": out.shape[2],
            "PAGE_SIZE": features.page_size,
            **_mask(features, rows),
            "ALIBI": features.alibi,
            "SOFTCAP": features.softcap != 0,
            "FOLD": features.scale > 0 and not features.softcap and not features.alibi and layer.q_scale is None and layer.k_scale is None,
            "SCALE_BY_HEAD": features.scale_by_head,
            "FP8": FP8_FORMATS.get(k.dtype, 0),
            "FP8_NATIVE": features.fp8_native,
            "Q_FP8": FP8_FORMATS.get(q.dtype, 0),
            "DTYPE": _TRITON_DTYPES[features.dtype],
            "STAGED": by_descriptors or rows.groups,
            "PREFETCH": config.prefetch,
            "SWAP": config.swap,
            "EARLY": features.dependents,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_D": block_d,
            "BLOCK_DV": block_dv,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            **_early(features),
        }

    changing = {
        "q_ptr": _bytes(q),
        "k_ptr": _bytes(k),
        "v_ptr": _bytes(v),
        "k_descriptor": _descriptor(k, config.block_n, block_d) if by_descriptors else None,
        "v_descriptor": _descriptor(v, config.block_n, block_dv) if by_descriptors else None,
        "out_ptr": out,
        "lse_ptr": lse,
        "slot_out_ptr": work.slot_out,
        "slot_lse_ptr": work.slot_lse,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "table_ptr": rows.table,
        "prefix_lens_ptr": rows.prefix_lens,
        "causal_ptr": None if rows.causal is None else rows.causal.view(torch.uint8),
        "row_span_start_ptr": rows.row_span_start,
        "row_spans_ptr": rows.row_spans,
        "sinks_ptr": layer.sinks,
        "slopes_ptr": layer.slopes,
        "q_scale_ptr": layer.q_scale,
        "k_scale_ptr": layer.k_scale,
        "v_scale_ptr": layer.v_scale,
    }
    tensors = described_by(q), described_by(k), described_by(v), described_by(out)
    rest = lse is None, rows.row_spans is None, rows.groups, rows.table.stride(0), layer.sinks is not None and layer.sinks.dtype
    key = ("attend", tensors, rest, tuple(scale is None for scale in scales), by_descriptors)
    call(work.held, key, paged_attention, (work.items.shape[0] * kv_heads,), changing, fixed)


def _combine(q: Tensor, k: Tensor, out: Tensor, lse: Tensor | None, work: Work, features: Features, layer: Layer) -> None:
    kv_heads, size, block_m = k.shape[-2], out.shape[2], work.config.block_m
    group, rows = q.shape[1] // kv_heads, max(1, block_m // 32)
    chunks = triton.cdiv(block_m // group * group, rows)

    def fixed() -> dict[str, Any]:
        return {
            "stride_out_token": out.stride(0),
            "stride_out_head": out.stride(1),
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "V_HEAD_SIZE": size,
            "BLOCK_M": block_m,
            "CHUNKS": chunks,
            "ROWS": rows,
            "BLOCK_P": max(1, 1024 // power_of_two(size)),
            "BLOCK_DV": power_of_two(size),
            "EARLY": features.dependents,
            "num_warps": 1,
            **_early(features),
        }

    changing = {
        "slot_out_ptr": work.slot_out,
        "slot_lse_ptr": work.slot_lse,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "merges_ptr": work.merges,
        "out_ptr": out,
        "lse_ptr": lse,
        "sinks_ptr": layer.sinks,
    }
    # A warp for each of the attention kernel that the device holds at once: in decode so many find room beside it, and wait there for its end.
    grid = (kv_heads * min(work.merges.shape[0] * chunks, work.config.num_warps * work.room),)
    key = ("combine", described_by(out), lse is None, layer.sinks is not None and layer.sinks.dtype)
    call(work.held, key, combine, grid, changing, fixed)


def store(new: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None, page_size: int, scale_by_head: bool) -> None:
    """Write ``new [tokens, Hkv, D]`` at int64 ``slots``; fp8 caches hold ``value / scale``, rounded to nearest even and saturated."""
    if slots.shape[0] == 0:
        return
    page, key, head = _strides(cache)
    with on(new.device):
        write_cache[(slots.shape[0], new.shape[1])](
            new_ptr=new,
            cache_ptr=_bytes(cache),
            slots_ptr=slots,
            scale_ptr=scale,
            largest=torch.finfo(cache.dtype).max,
            stride_new_token=new.stride(0),
            stride_new_head=new.stride(1),
            stride_page=page,
            stride_key=key,
            stride_head=head,
            SIZE=new.shape[2],
            PAGE_SIZE=page_size,
            SCALE_BY_HEAD=scale_by_head,
            FP8=FP8_FORMATS.get(cache.dtype, 0),
            BLOCK=triton.next_power_of_2(new.shape[2]),
            num_warps=1,
        )


def merge_states(outs: Tensor, lses: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``outs [states, tokens, Hq, Dv]`` and ``lses`` float32 ``[states, tokens, Hq]`` (natural log) merged, the sink added once."""
    outs, lses = outs.contiguous(), lses.contiguous()
    states, tokens, heads, size = outs.shape
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=outs.device)
    if out.numel():
        with on(out.device):
            merge[(tokens * heads,)](
                outs,
                lses,
                sinks,
                out,
                lse,
                states,
                tokens * heads,
                HEADS=heads,
                V_HEAD_SIZE=size,
                BLOCK_P=4,
                BLOCK_DV=power_of_two(size),
                num_warps=1,
            )
    return out, lse


def _strides(cache: Tensor) -> tuple[int, ...]:
    """Strides of page, key and head; of packed keys, the "page" is the first key of the row."""
    return cache.stride()[:3] if cache.dim() == 4 else (cache.stride(0), *cache.stride()[:2])


def _early(features: Features) -> dict[str, bool]:
    """The launch option of kernels that start while the one before still runs; targets without it don't know its name."""
    return {"launch_pdl": True} if features.dependents else {}


def _mask(features: Features, rows: Rows) -> dict[str, Any]:
    """The kernels' constants that say who sees whom."""
    return {
        "CAUSAL": features.causal,
        "WINDOW": features.window,
        "WINDOW_RIGHT": features.window_right,
        "CHUNK": features.chunk,
        "LOOKBACK": features.lookback,
        "SPANS": features.spans if rows.row_spans is not None else 0,
        "GROUPS": rows.groups,
        "RSWA": features.rswa,
    }


def describable(cache: Tensor, block: int) -> bool:
    """Whether a tensor descriptor can stand for the pages: everything on 16 bytes, and at most 256 elements a row."""
    places = (cache.data_ptr(), *(stride * cache.element_size() for stride in cache.stride()[:3]))
    return block <= 256 and all(place % 16 == 0 for place in places)


def _descriptor(cache: Tensor, block_n: int, block: int) -> TensorDescriptor:
    """The pages as ``[pages, Hkv, page, SIZE]``, whatever their layout, of which a load takes ``block_n`` keys of one head."""
    view = _bytes(cache).transpose(1, 2)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), [1, 1, block_n, block])


def _bytes(cache: Tensor) -> Any:
    return cache.view(torch.uint8) if cache.dtype in FP8_FORMATS else cache
