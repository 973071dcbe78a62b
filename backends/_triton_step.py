"""What the Triton adapter keeps of a step, and what it makes of a spec and a batch: constants and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from attnmux.dispatch.batch import Batch
from attnmux.dispatch.device import Device
from attnmux.dispatch.rows import classify
from attnmux.dispatch.spec import DTYPE_NAMES, AttentionSpec
from attnmux.kernels.triton import launch


@dataclass(slots=True)
class State:
    """A step: its rows on the device, and one launch for decode rows and one for the rest.

    Args:
        stream: whose workspace it uses (``None`` on a CPU).
        ready: when its tables are on the device.
        used: the last run on another stream, which must end before the tables are written anew.
    """

    rows: launch.Rows
    work: dict[str, launch.Work]
    stream: Any = None
    ready: Any = None
    used: Any = None

    def tensors(self) -> Iterator[Tensor]:
        """All that a launch reads or writes besides the layer's own tensors."""
        parts: list[launch.Rows | launch.Work] = [self.rows, *self.work.values()]
        for part in parts:
            yield from (value for field in fields(part) if isinstance(value := getattr(part, field.name), Tensor))


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


def items_table(rows: Sequence[tuple[int, ...]], held: int, width: int, before: Tensor | None, device: torch.device) -> Tensor:
    """Rows as int32 ``[held, width]``, the rest marked empty; into ``before`` where a graph may hold that."""
    host = torch.full((held, width), -1, dtype=torch.int32)
    if rows:
        host[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    if device.type != "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True) if before is None else before.copy_(host, non_blocking=True)


def multiprocessors(device: torch.device) -> int:
    """How many blocks of threads a device runs side by side, at one a unit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 1  # the interpreter runs programs one after another
