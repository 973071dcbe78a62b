"""The kernels' arguments by name, from what a launch is given."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmux.kernels.triton.arguments import FP8_FORMATS, Features, Layer, Lengths, Rows, Work
from attnmux.kernels.triton.config import LaunchConfig, power_of_two
from attnmux.kernels.triton.descriptors import Descriptors, as_bytes
from attnmux.kernels.triton.plan import ITEM, ITEM_PAGES

LANES = 128
"""Rows, units or items that the plan looks at side by side."""

WRITTEN = 2048
"""Elements of keys that a program writes, about."""

_TRITON_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def of_plan(rows: Rows, lens: Lengths, work: Work, features: Features, group: int) -> dict[str, Any]:
    """Arguments of ``plan_step``."""
    return {
        "query_start_ptr": lens.query_start_loc,
        "seq_lens_ptr": lens.seq_lens,
        "prefix_lens_ptr": rows.prefix_lens,
        "causal_ptr": _flags(rows.causal),
        "row_span_start_ptr": rows.row_span_start,
        "row_spans_ptr": rows.row_spans,
        "first_ptr": work.first,
        "tiles_ptr": work.tiles,
        "cuts_ptr": work.cuts,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "merges_ptr": work.merges,
        "table_ptr": rows.table,
        "stride_table": rows.table.stride(0),
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
        "PAGE_SIZE": features.page_size,
        "FIRST": _first_pages(work.config, features),
        "L": LANES,
        "num_warps": 8,
        **_at_most(248, features),  # left alone, ptxas of CUDA 13 takes 80 and spills
    }


def of_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, rows: Rows, work: Work, features: Features, layer: Layer, by: Descriptors
) -> dict[str, Any]:
    """Arguments of ``paged_attention``."""
    config, kv_heads, staged = work.config, k.shape[-2], by[0] is not None or rows.groups
    (k_page, k_key, k_head), (v_page, v_key, v_head) = page_strides(k), page_strides(v)
    return {
        "q_ptr": as_bytes(q),
        "k_ptr": as_bytes(k),
        "v_ptr": as_bytes(v),
        "k_descriptor": by[0],
        "v_descriptor": by[1],
        "out_ptr": out,
        "lse_ptr": lse,
        "slot_out_ptr": work.slot_out,
        "slot_lse_ptr": work.slot_lse,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "table_ptr": rows.table,
        "prefix_lens_ptr": rows.prefix_lens,
        "causal_ptr": _flags(rows.causal),
        "row_span_start_ptr": rows.row_span_start,
        "row_spans_ptr": rows.row_spans,
        "sinks_ptr": layer.sinks,
        "slopes_ptr": layer.slopes,
        "q_scale_ptr": layer.q_scale,
        "k_scale_ptr": layer.k_scale,
        "v_scale_ptr": layer.v_scale,
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
        "STAGED": staged,
        "PREFETCH": config.prefetch,
        "FIRST": 0 if staged else _first_pages(config, features),
        "SWAP": config.swap,
        "EARLY": features.dependents,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": power_of_two(q.shape[2]),
        "BLOCK_DV": power_of_two(out.shape[2]),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **_at_most(features.registers // (32 * config.num_warps * config.programs), features),
        **_early(features),
    }


def of_merging(
    out: Tensor, lse: Tensor | None, kv_heads: int, work: Work, features: Features, layer: Layer
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and arguments of ``combine``.

    A warp for each of the attention kernel that the device holds at once: in decode so many find room beside it, and wait there for its end.
    """
    size, block_m = out.shape[2], work.config.block_m
    group, rows = out.shape[1] // kv_heads, max(1, block_m // 32)
    chunks = triton.cdiv(block_m // group * group, rows)
    arguments = {
        "slot_out_ptr": work.slot_out,
        "slot_lse_ptr": work.slot_lse,
        "items_ptr": work.items,
        "count_ptr": work.count,
        "merges_ptr": work.merges,
        "out_ptr": out,
        "lse_ptr": lse,
        "sinks_ptr": layer.sinks,
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
    return (kv_heads * min(work.merges.shape[0] * chunks, work.config.num_warps * work.room), 1, 1), arguments


def of_write(
    new: tuple[Tensor, Tensor], caches: tuple[Tensor, Tensor], slots: Tensor, scales: tuple[Tensor | None, Tensor | None], features: Features
) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and arguments of ``write_cache``. Pairs are keys and values."""
    (k, v), (k_cache, v_cache) = new, caches
    (k_page, k_key, k_head), (v_page, v_key, v_head) = page_strides(k_cache), page_strides(v_cache)
    heads, block_d, block_dv = k.shape[1], triton.next_power_of_2(k.shape[2]), triton.next_power_of_2(v.shape[2])
    block_h = min(triton.next_power_of_2(heads), max(1, WRITTEN // max(block_d, block_dv)))
    arguments = {
        "k_ptr": k,
        "v_ptr": v,
        "k_cache_ptr": as_bytes(k_cache),
        "v_cache_ptr": as_bytes(v_cache),
        "slots_ptr": slots,
        "k_scale_ptr": scales[0],
        "v_scale_ptr": scales[1],
        "largest": torch.finfo(k_cache.dtype).max,
        "stride_k_token": k.stride(0),
        "stride_k_head": k.stride(1),
        "stride_v_token": v.stride(0),
        "stride_v_head": v.stride(1),
        "stride_k_cache_page": k_page,
        "stride_k_cache_key": k_key,
        "stride_k_cache_head": k_head,
        "stride_v_cache_page": v_page,
        "stride_v_cache_key": v_key,
        "stride_v_cache_head": v_head,
        "KV_HEADS": heads,
        "SIZE": k.shape[2],
        "V_SIZE": v.shape[2],
        "PAGE_SIZE": features.page_size,
        "SCALE_BY_HEAD": features.scale_by_head,
        "FP8": FP8_FORMATS.get(k_cache.dtype, 0),
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "EARLY": features.dependents,
        "num_warps": 4 if block_h * block_d >= WRITTEN // 2 else 1,
        **_early(features),
    }
    return (slots.shape[0], triton.cdiv(heads, block_h), 1), arguments


def page_strides(cache: Tensor) -> tuple[int, ...]:
    """Strides of page, key and head; of packed keys, the "page" is the first key of the row."""
    return cache.stride()[:3] if cache.dim() == 4 else (cache.stride(0), *cache.stride()[:2])


def _flags(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.view(torch.uint8)


def _first_pages(config: LaunchConfig, features: Features) -> int:
    """How many pages a tile has, if items hold those of their first two: they must be read ahead, and find room."""
    page, tile = features.page_size, config.block_n
    if not config.prefetch or not page or (page % tile and tile % page):
        return 0
    count = max(1, tile // page)
    return count if 2 * count <= ITEM.value - ITEM_PAGES.value else 0


def _at_most(registers: int, features: Features) -> dict[str, int]:
    """The launch option that bounds the registers of a thread, where there is one and it bounds anything."""
    return {"maxnreg": registers // 8 * 8} if features.registers and registers < 255 else {}


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
