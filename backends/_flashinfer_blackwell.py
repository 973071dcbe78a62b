"""NVIDIA's own kernels behind FlashInfer, for SM100 and SM103: trtllm-gen (prebuilt, fetched over the network) and cuDNN.

Written from the signatures of FlashInfer 0.7.2 and 0.7.4; not run by us, since no such device was at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flashinfer_launch import aligned
from attnmux.backends._flashinfer_pages import page_indices, pages_of
from attnmux.backends.flashinfer import COMPILER
from attnmux.dispatch.backend import LayerArgs
from attnmux.dispatch.batch import Batch
from attnmux.dispatch.rows import classify, group_rows
from attnmux.dispatch.spec import MAX_DECODE_TOKENS, AttentionSpec, Limits

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documentation asks for; the kernels do not say what they use."""


def choose(able: Sequence[str], kernel: str) -> str | None:
    """The vendor's kernel for text rows, or ``None`` for fa2 and fa3. cuDNN steps in where nothing can be compiled."""
    if kernel != "auto":
        return kernel if kernel in ("trtllm-gen", "cudnn") else None
    if "trtllm-gen" in able:
        return "trtllm-gen"
    return "cudnn" if "cudnn" in able and any(tool.probe() is None for tool in COMPILER) else None


@dataclass(slots=True, eq=False)
class Part:
    """Rows of one class.

    Args:
        tokens: ``(first, last + 1)`` of the step's query tokens, or ``None`` with ``index``.
        decode: whether they are decode rows.
        starts: int32 ``[rows + 1]`` of their query tokens.
        table, lens, key_starts: page table, key lengths and their running sum, cut to what a window leaves; trtllm-gen only.
        blind: bool ``[tokens, 1, 1]``, tokens of rows without keys.
        longest: query tokens and keys of the longest rows.
        wrapper: planned, cuDNN only.
        scratch: workspace, which belongs to ``stream``.
    """

    tokens: tuple[int, int] | None
    index: Tensor | None
    decode: bool
    starts: Tensor
    table: Tensor
    lens: Tensor
    key_starts: Tensor
    blind: Tensor
    longest: tuple[int, int]
    wrapper: Any
    scratch: Tensor
    stream: Any


def plan(spec: AttentionSpec, kernel: str, batch: Batch, workspace: Tensor | None, previous: Any, limits: Limits | None) -> list[Part]:
    """Prepare text rows. trtllm-gen reads lengths on the device, so upper bounds on the host will do; cuDNN is planned from exact ones."""
    device = batch.seq_lens.device
    scratch = workspace if workspace is not None else torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    stream = torch.cuda.current_stream(device)
    kinds: list[str | None] = list(classify(spec, batch))
    if kernel == "cudnn":
        kinds = [kind and (kind if length else "blank") for kind, length in zip(kinds, batch.key_lens, strict=True)]
    starts = torch.tensor([0, *batch.query_lens]).cumsum(0).tolist()
    parts = []
    for group in group_rows(kinds, batch.query_lens):
        rows, index = batch.take(group.rows), None
        if group.tokens is None:
            index = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in group.rows]).to(device, non_blocking=True)
        wrapper = _cudnn(spec, rows, scratch) if kernel == "cudnn" and group.backend != "blank" else None
        table, lens = _visible(spec, rows, limits) if kernel == "trtllm-gen" else (rows.seq_lens, rows.seq_lens)
        key_starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
        q_lens = rows.query_start_loc[1:] - rows.query_start_loc[:-1]
        blind = torch.repeat_interleave(rows.seq_lens == 0, q_lens, output_size=rows.num_tokens)[:, None, None]
        longest = max(rows.query_lens), max(rows.key_lens)
        if limits is not None:
            longest = min(limits.max_query_len, MAX_DECODE_TOKENS) if group.backend == "decode" else limits.max_query_len, limits.max_seq_len
        decode = group.backend == "decode"
        parts.append(Part(group.tokens, index, decode, rows.query_start_loc, table, lens, key_starts, blind, longest, wrapper, scratch, stream))
    return _into(previous, parts) if limits is not None else parts


def _into(previous: Any, parts: list[Part]) -> list[Part]:
    """The new step in the old step's buffers, where they have the same shapes."""
    for new, old in zip(parts, previous or (), strict=False):
        for name in ("starts", "table", "lens", "key_starts", "blind"):
            held, value = getattr(old, name), getattr(new, name)
            if held.shape == value.shape:
                setattr(new, name, held.copy_(value, non_blocking=True))
    return parts


def _visible(spec: AttentionSpec, rows: Batch, limits: Limits | None) -> tuple[Tensor, Tensor]:
    """Page table and lengths from each row's first visible page on, by lengths on the device. Entries past the end repeat the first page."""
    assert rows.block_table is not None and spec.page_size is not None
    table, lens, size = rows.block_table, rows.seq_lens, spec.page_size
    first = torch.zeros_like(lens)
    if spec.sliding_window is not None:
        q_lens = rows.query_start_loc[1:] - rows.query_start_loc[:-1]
        first = (lens - q_lens - spec.sliding_window + 1).clamp(min=0) // size
    lens = lens - first * size
    columns = table.shape[1] if limits is None else -(-limits.max_seq_len // size)
    column = torch.arange(columns, device=table.device, dtype=first.dtype)
    at = (column + first[:, None]).clamp(max=table.shape[1] - 1).long()
    found = table.gather(1, at)
    used = column < ((lens + size - 1) // size)[:, None]
    return torch.where(used, found, found[:, :1]).clamp(min=0), lens


def _cudnn(spec: AttentionSpec, rows: Batch, scratch: Tensor) -> Any:
    flashinfer: Any = import_module("flashinfer")
    pages = pages_of(spec, rows)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, kv_layout=spec.kv_layout, backend="cudnn")
    wrapper.plan(
        qo_indptr=torch.tensor([0, *rows.query_lens], dtype=torch.int64).cumsum(0).to(torch.int32),
        paged_kv_indptr=torch.tensor(pages.indptr, dtype=torch.int32),
        paged_kv_indices=page_indices(rows, pages),
        paged_kv_last_page_len=torch.tensor(pages.last, dtype=torch.int32),
        num_qo_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim_qk=spec.head_size,
        page_size=spec.page_size,
        head_dim_vo=spec.v_head_size,
        causal=True,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=spec.scale,
        window_left=-1,
        logits_soft_cap=0.0,
        q_data_type=spec.dtype,
        kv_data_type=spec.kv_dtype,
        o_data_type=spec.dtype,
        non_blocking=True,
    )
    return wrapper


def run(spec: AttentionSpec, kernel: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, parts: list[Part], out: Tensor, layer: LayerArgs) -> None:
    """One layer of every part.

    Raises:
        RuntimeError: cuDNN is to be captured; its plans are made anew each step.
    """
    if kernel == "cudnn" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("FlashInfer's cuDNN path cannot be captured here: use kernel = 'fa2' in the options of flashinfer")
    for part in parts:
        query = q.index_select(0, part.index) if part.index is not None else q[slice(*(part.tokens or (0, None)))]
        query = query if aligned(query) else query.contiguous()
        place = None if part.index is not None else out[slice(*(part.tokens or (0, None)))]
        target = (
            place if place is not None and place.is_contiguous() else torch.empty((len(query), *out.shape[1:]), dtype=out.dtype, device=out.device)
        )
        if kernel == "trtllm-gen":
            _trtllm(spec, query.contiguous(), (k_cache, v_cache), part, target, layer)
        elif part.wrapper is None:
            target.zero_()
        else:
            part.wrapper.run(query.contiguous(), (k_cache, v_cache), out=target)
        target.masked_fill_(part.blind, 0.0)  # what the kernels write for a row without keys is not documented
        if part.index is not None:
            out.index_copy_(0, part.index, target)
        elif place is not None and target is not place:
            place.copy_(target)


def _trtllm(spec: AttentionSpec, q: Tensor, caches: tuple[Tensor, Tensor], part: Part, out: Tensor, layer: LayerArgs) -> None:
    given: dict[str, Any] = {
        "workspace_buffer": part.scratch if torch.cuda.current_stream(q.device) == part.stream else torch.zeros_like(part.scratch),
        "block_tables": part.table,
        "seq_lens": part.lens,
        "bmm1_scale": spec.scale,
        "bmm2_scale": 1.0,
        "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
        "out": out,
        "sinks": None if layer.sinks is None else layer.sinks.to(torch.float32).contiguous(),
        "kv_layout": spec.kv_layout,
        "cum_seq_lens_q": part.starts,
        "max_q_len": part.longest[0],
        "backend": "trtllm-gen",
    }
    if part.decode:
        import_module("flashinfer.decode").trtllm_batch_decode_with_kv_cache(q, caches, max_seq_len=part.longest[1], q_len_per_req=None, **given)
        return
    context = import_module("flashinfer.prefill").trtllm_batch_context_with_kv_cache
    rows = {"batch_size": len(part.lens), "max_kv_len": part.longest[1], "cum_seq_lens_kv": part.key_starts, "causal": True}
    context(q, caches, **rows, **given)
