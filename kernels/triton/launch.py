"""Launching the kernels on tensors. Inputs are taken as checked; nothing here synchronises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmux.kernels.triton.arguments import FP8_FORMATS, Features, Layer, Lengths, Rows, Work
from attnmux.kernels.triton.attention import paged_attention
from attnmux.kernels.triton.call import Bound, Held, addresses, alignment, bind, capturing, on
from attnmux.kernels.triton.combine import combine, merge
from attnmux.kernels.triton.config import power_of_two
from attnmux.kernels.triton.descriptors import Descriptors, descriptors
from attnmux.kernels.triton.parameters import of_attention, of_merging, of_plan, of_write
from attnmux.kernels.triton.plan import CUT, ITEM, plan_step
from attnmux.kernels.triton.write import write_cache

__all__ = [
    "CUT",
    "FP8_FORMATS",
    "ITEM",
    "Features",
    "Held",
    "Layer",
    "Lengths",
    "Rows",
    "Work",
    "attend",
    "capturing",
    "merge_states",
    "plan",
    "store",
]

_ROWS = ("prefix_lens_ptr", "causal_ptr", "row_span_start_ptr", "row_spans_ptr")
_PLAN_CHANGES = ("query_start_ptr", "seq_lens_ptr", "table_ptr", *_ROWS)
_LAYER = ("sinks_ptr", "slopes_ptr", "q_scale_ptr", "k_scale_ptr", "v_scale_ptr")
_SLOTS = ("slot_out_ptr", "slot_lse_ptr")
_CHANGES = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", *_LAYER, "table_ptr", *_ROWS, *_SLOTS, "k_descriptor", "v_descriptor")
"""What a launch of a known form is given anew. A step's tables stay where they are."""
_WRITE_CHANGES = ("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr", "slots_ptr", "k_scale_ptr", "v_scale_ptr")


def plan(rows: Rows, lens: Lengths, work: Work, features: Features, group: int, stream: int | None = None) -> None:
    """Cut a step: write the tables of ``work`` from the lengths on the device. One small launch, after which another one, of any kernel or copy, must
    come before ``attend``: that reads the tables while the launch before it may still run.

    Args:
        rows, lens, work, features: the step, its lengths, its tables, and the layers' attention.
        group: query heads a KV head.
        stream: the current one as a number, where the caller has it.
    """
    key = (lens.seqs, rows.row_spans is None, rows.groups, rows.table.stride(0))
    with on(lens.seq_lens.device):
        held = work.held.get(key)
        if held is None:
            if held := bind(plan_step, (1, 1, 1), of_plan(rows, lens, work, features, group), _PLAN_CHANGES):
                work.held[key] = held
            return
        values = addresses((lens.query_start_loc, lens.seq_lens, rows.table, *rows.masks()))
        for bound in held:
            bound(values, stream)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor | None,
    rows: Rows,
    work: Work,
    features: Features,
    layer: Layer,
    stream: int | None = None,
    known: Sequence[Bound] = (),
) -> Sequence[Bound]:
    """Attention of one launch into ``out`` and ``lse``.

    Args:
        q: ``[tokens, Hq, D]``.
        k, v: ``[pages, page, Hkv, D]`` (any strides, last dimension contiguous), or packed ``[kv_tokens, Hkv, D]``.
        out: ``[tokens, Hq, Dv]``; lse: float32 ``[tokens, Hq]``, contiguous, or ``None``.
        rows, work, features, layer: the step, its cut as ``plan`` wrote it, and the layer.
        stream: the current one as a number, where the caller has it.
        known: what this returned for a call that differs in addresses and contents only.

    Returns:
        What to launch for such calls; nothing where that is not known.
    """
    by = descriptors(k, v, q.shape[2], out.shape[2], rows, work, features) if features.descriptors else (None, None)
    values = addresses((q, k, v, out, lse, *layer, rows.table, *rows.masks(), work.slot_out, work.slot_lse))
    aligned = alignment(*values[:4])
    with on(q.device):
        if not known or aligned is not True:
            strides = q.stride(), k.stride(), v.stride(), out.stride(), rows.table.stride()
            key = (aligned, strides, lse is None, rows.row_spans is None, rows.groups, by[0] is None, layer.form())
            known = work.held.get(key, ())
            if not known:
                known = _attend_first(q, k, v, out, lse, rows, work, features, layer, by)
                if known:
                    work.held[key] = known
                return ()
        for bound in known:
            bound((*values, *by), stream)
    return known if aligned is True else ()


def _attend_first(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, rows: Rows, work: Work, features: Features, layer: Layer, by: Descriptors
) -> list[Bound]:
    """Launch through Triton: the attention kernel, and the one that merges if there may be anything to merge."""
    kv_heads = k.shape[-2]
    bound = bind(paged_attention, (work.items.shape[0] * kv_heads, 1, 1), of_attention(q, k, v, out, lse, rows, work, features, layer, by), _CHANGES)
    if work.slot_lse.shape[0]:
        bound += bind(combine, *of_merging(out, lse, kv_heads, work, features, layer), _CHANGES)
    return bound


def store(
    new: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    slots: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
    features: Features,
    held: Held,
    stream: int | None = None,
) -> None:
    """Write keys ``[tokens, Hkv, D]`` and values ``[tokens, Hkv, Dv]`` into their caches at int64 ``slots``, -1 nowhere; fp8 caches hold
    ``value / scale``, rounded to nearest even and saturated.

    Args:
        new, caches, scales: of keys and of values.
        slots: contiguous; later tokens of ``new`` are not written.
        features: for the page size, and whether scales are of heads.
        held: compiled kernels, for one set of features.
        stream: the current one as a number, where the caller has it.
    """
    if slots.shape[0] == 0:
        return
    values = addresses((*new, *caches, slots, *scales))
    key = (alignment(*values[:4]), new[0].stride(), new[1].stride(), caches[0].stride(), caches[1].stride(), scales[0] is None)
    with on(slots.device):
        found = held.get(key)
        if found is None:
            if found := bind(write_cache, *of_write(new, caches, slots, scales, features), _WRITE_CHANGES):
                held[key] = found
            return
        for bound in found:
            bound(values, stream, (slots.shape[0], *bound.grid[1:]))


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
