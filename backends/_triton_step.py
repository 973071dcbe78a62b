"""What the Triton adapter keeps of a step, and what it makes of a spec and a batch: constants and tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.rows import classify
from attnmux.dispatch.spec import DTYPE_NAMES, AttentionSpec, Limits
from attnmux.kernels.triton import launch


@dataclass(slots=True)
class State:
    """A step: its rows on the device, and its launches by name.

    Args:
        work: all that were ever made, of which a graph may hold any.
        now: those that this step needs.
        graph: what a captured graph must hold: those, and one for each class of rows that has no tokens now and had some in an earlier step.
        raw_stream, stream: whose workspace it uses, as a number and as an object (0 and ``None`` on a CPU).
        ready: when its tables are on the device.
        known: what to launch for calls of a form, by kind of row, form and the inputs that are there.
        used: the last run on each other stream, by its number: they must end before the tables are written anew.
    """

    rows: launch.Rows
    work: dict[str, launch.Work]
    now: dict[str, launch.Work]
    graph: dict[str, launch.Work]
    raw_stream: int = 0
    stream: Any = None
    ready: Any = None
    used: dict[int, Any] = field(default_factory=dict)
    known: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """All that a launch reads or writes besides the layer's own tensors."""
        parts: list[launch.Rows | launch.Work] = [self.rows, *self.work.values()]
        for part in parts:
            yield from (value for each in fields(part) if isinstance(value := getattr(part, each.name), Tensor))


def features_of(spec: AttentionSpec, device: Device) -> launch.Features:
    """The kernel's constants for a spec on a device."""
    quantised = spec.kv_dtype in launch.FP8_FORMATS
    native = quantised and device.type == "cuda" and DTYPE_NAMES[spec.kv_dtype] in device.features  # Triton converts fnuz on AMD only, and slowly
    window = spec.sliding_window or 0
    chunk, lookback = spec.chunk or (0, 0)
    return launch.Features(
        scale=spec.scale,
        dtype=spec.dtype,
        page_size=spec.page_size or 0,
        causal=2 if spec.causal == "per_sequence" else int(spec.causal),
        window=window,
        window_right=max(window - 1, 0) if spec.window_right is None else spec.window_right,
        chunk=chunk,
        lookback=lookback,
        spans={None: 0, "override_window": 1, "within_window": 2}[spec.mm_prefix],
        rswa=spec.rswa_window or 0,
        alibi={None: 0, "linear": 1, "sqrt": 2}[spec.alibi],
        softcap=spec.softcap or 0.0,
        scale_by_head=spec.kv_scale == "head",
        fp8_native=native,
        descriptors="tma" in device.features and spec.dtype == spec.kv_dtype != torch.float32,  # others pass through registers in any case
        registers=65536 if device.type == "cuda" else 0,
        dependents="tma" in device.features,  # both came with Hopper
    )


def rows_of(spec: AttentionSpec, batch: Batch, device: torch.device) -> launch.Rows:
    """The batch's own tensors, and its spans on the device."""
    table = batch.block_table if batch.block_table is not None else batch.kv_start_loc
    assert table is not None  # checked with the batch
    starts, row_spans, groups = span_tables(spec, batch) if batch.mm_spans is not None else ([], [], False)

    def on_device(values: list[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    return launch.Rows(
        table=table if table.stride(-1) == 1 else table.contiguous(),  # kernels read neighbours; a row may begin anywhere
        prefix_lens=None if batch.prefix_lens is None else batch.prefix_lens.contiguous(),
        causal=None if batch.causal is None else batch.causal.contiguous(),
        row_span_start=on_device(starts) if row_spans else None,
        row_spans=on_device(row_spans) if row_spans else None,
        groups=groups,
    )


def span_tables(spec: AttentionSpec, batch: Batch) -> tuple[list[int], list[list[int]], bool]:
    """Row starts into a flat list of ``[start, end, group]``, and whether any span has a group.

    Only of rows with a token inside a span: no other row sees more for its spans, and a batch without such rows can be captured.
    """
    starts, flat, grouped = [0], [], False
    for row, row_class in enumerate(classify(spec, batch)):
        numbers: dict[int, int] = {}
        for start, end, group in batch.spans(row) if row_class == "image" else ():
            grouped |= group is not None
            flat.append([start, end, -1 if group is None else numbers.setdefault(group, len(numbers))])
        starts.append(len(flat))
    return starts, flat, grouped


def kept(given: launch.Rows, earlier: launch.Rows | None, limits: Limits | None, page_size: int) -> launch.Rows:
    """What layers read of a batch, in buffers of ours; with limits as large as those, since a graph may hold them, and filled anew by every plan.

    To be called behind the plan kernel, whose tables attention reads while the launch before it may still run: so that must be another, and copying
    the block table is one.
    """
    seqs, columns = given.table.shape[0], given.table.shape[1:]
    if limits is not None:
        seqs = limits.max_num_seqs + (0 if columns else 1)  # starts have an end
        columns = torch.Size([-(-limits.max_seq_len // page_size)] if columns else [])
    table = _copy(given.table, earlier.table if earlier else None, (seqs, *columns))
    if not given.table.numel():  # that launched nothing
        torch.zeros(1, device=table.device)
    prefix, causal = given.prefix_lens, given.causal
    if limits is not None:
        prefix = None if prefix is None else _copy(prefix, earlier.prefix_lens if earlier else None, (seqs,))
        causal = None if causal is None else _copy(causal, earlier.causal if earlier else None, (seqs,))
    return launch.Rows(table, prefix, causal, given.row_span_start, given.row_spans, given.groups)


def _copy(new: Tensor, held: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """What fits of ``new`` into ``held``, or into a buffer of that shape; a table may be wider than it need be."""
    buffer = torch.empty(shape, dtype=new.dtype, device=new.device) if held is None else held
    if new.shape == buffer.shape:
        return buffer.copy_(new, non_blocking=True)
    part = tuple(slice(min(n, m)) for n, m in zip(new.shape, shape, strict=True))
    buffer[part].copy_(new[part], non_blocking=True)
    return buffer


@dataclass(frozen=True, slots=True)
class Room:
    """How large the tables of a launch are, and how many items of one KV head the device holds at once."""

    units: int
    items: int
    merges: int
    slots: int
    at_once: int
    cut_tiles: int

    def tables(self, seqs: int, device: torch.device) -> dict[str, Any]:
        """The tables that ``plan_step`` writes, uninitialised, in one allocation; items lie on 16 bytes."""
        item, cut = launch.ITEM.value, launch.CUT.value
        sizes = {"items": self.items * item, "cuts": self.units * cut, "first": seqs, "tiles": self.units, "count": 2, "merges": self.merges}
        room = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
        tables = dict(zip(sizes, torch.split(room, list(sizes.values())), strict=True))
        return tables | {"items": tables["items"].view(-1, item), "cuts": tables["cuts"].view(-1, cut)}


def room_for(units: int, tiles: int, programs: int, kv_heads: int, cut_tiles: int) -> Room:
    """Room for at most so many Q blocks, of at most so many tiles each."""
    at_once = max(1, programs // kv_heads)
    if not cut_tiles:
        # No way to cut makes more: each of the places but the last ends in one unit at most. A launch has a program for each of these.
        parts = min(units * max(1, tiles), units + at_once - 1)
        return Room(units, parts, min(units, at_once), min(parts, 2 * at_once) if parts > units else 0, at_once, 0)
    parts = max(1, -(-tiles // cut_tiles))
    return Room(units, units * parts, units, units * parts if parts > 1 else 0, at_once, cut_tiles)


def multiprocessors(device: torch.device) -> int:
    """How many blocks of threads a device runs side by side, at one a unit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 1  # the interpreter runs programs one after another
