"""A wrapper of FlashInfer with the buffers that one plan lives in, and the pool that lends such lanes to live plans.

FlashInfer keeps a plan inside its wrapper: page lists, and a table of work in a device buffer that it fills from a pinned one. A lane is
a wrapper whose buffers are ours to size and to guard: the pinned buffer may only be written again when its last copy is done, and the
device buffers only behind whatever still reads them on another stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnmux.backends._flashinfer_modules import Module
from attnmux.backends._flashinfer_pages import Pages
from attnmux.dispatch.errors import complaint
from attnmux.dispatch.spec import AttentionSpec

flashinfer: Any = import_module("flashinfer")
cuda: Any = torch.cuda

FREE_LANES = 16
"""Lanes that a pool keeps for later plans."""
OURS = ("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_max_total_num_rows")
"""What we set inside a wrapper, because its constructor would take 8 MiB of device memory and of pinned memory for each."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The shape of a launch that a CUDA graph may hold.

    Args:
        seqs: rows, padding rows included.
        tokens: query tokens it has room for.
        pages: pages it has room for.
    """

    seqs: int
    tokens: int
    pages: int


@dataclass(slots=True)
class Work:
    """What a lane is planned for, all of it on the host but the page ids.

    Args:
        query_lens: of each row.
        pages: of each row.
        indices: int32 ``[pages]``, page ids on the device.
        split: pages of a part where we cut, else ``None``.
        room: bytes of the tables that the plan needs.
    """

    query_lens: Sequence[int]
    pages: Pages
    indices: Tensor
    split: int | None
    room: int


class Lane:
    """One wrapper for one module. ``graph`` fixes its shape.

    Attributes:
        stream: where it was planned last.
        ready: when that plan's tables are on the device.
        used: the last run on each other stream, by its number.
        tokens: query tokens of the last plan.
        holder: whose it is while a plan lives.
    """

    def __init__(self, spec: AttentionSpec, module: Module, device: torch.device, graph: Captured | None) -> None:
        self.spec, self.module, self.device, self.graph = spec, module, device, graph
        self.stream: Any = None
        self.holder: object = None
        self.ready: Any = cuda.Event()
        self.used: dict[int, Any] = {}
        self.tokens = 0
        self._pinned: list[tuple[Tensor, Any]] = []
        with torch.inference_mode(False):  # later plans write into its buffers, in that mode or not
            self.wrapper = _wrapper(spec, module, device, graph)
        for name in OURS:
            if not hasattr(self.wrapper, name):
                raise RuntimeError(f"FlashInfer {flashinfer.__version__} keeps no {name}: attnmux knows versions 0.7.2 to 0.7.4")
        self._own("_int_workspace_buffer", torch.empty(0, dtype=torch.uint8, device=device))
        if graph is not None:  # FlashInfer would take the first plan's tokens for all that will ever come
            self._own("_max_total_num_rows", graph.tokens)

    def plan(self, work: Work, scratch: Tensor) -> None:
        """Plan for other rows, on the current stream. Waits for nothing on the host.

        Raises:
            ValueError: more rows, tokens or pages than the shape that a graph holds.
        """
        stream, spec, captured = cuda.current_stream(self.device), self.spec, self.graph
        total, pages = sum(work.query_lens), work.pages
        if captured is not None and (total > captured.tokens or pages.indptr[-1] > captured.pages):
            offered = f"{total} query tokens and {pages.indptr[-1]} pages"
            raise ValueError(
                complaint("the refreshed step", offered, f"at most {captured.tokens} and {captured.pages}, as first planned", "make a new plan")
            )
        self._behind_readers(stream)
        self._own("_float_workspace_buffer", scratch)
        self._make_room(work.room)
        starts = torch.tensor([0, *work.query_lens], dtype=torch.int64).cumsum(0).to(torch.int32)
        given: dict[str, Any] = {
            "qo_indptr": starts,  # host tensors: FlashInfer schedules on the host and copies them itself
            "paged_kv_indptr": torch.tensor(pages.indptr, dtype=torch.int32),
            "paged_kv_indices": work.indices,
            "paged_kv_last_page_len": torch.tensor(pages.last, dtype=torch.int32),
            "num_qo_heads": spec.num_q_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_size,
            "page_size": pages.size,
            "head_dim_vo": spec.v_head_size,
            "causal": spec.causal is True and not self.module.owns_mask,
            "pos_encoding_mode": "NONE",
            "use_fp16_qk_reduction": False,
            "sm_scale": spec.scale,
            "window_left": -1 if spec.sliding_window is None or self.module.owns_mask else spec.sliding_window - 1,
            "logits_soft_cap": 0.0,  # ours is the variant's
            "q_data_type": spec.dtype,
            "kv_data_type": spec.kv_dtype,
            "o_data_type": spec.dtype,
            "non_blocking": True,
            "disable_split_kv": False,
        }
        if work.split is not None:
            given["fixed_split_size"] = work.split
        with cuda.device(self.device):
            self.wrapper.plan(**given)
            self._pinned[-1][1].record(stream)
        self.stream, self.tokens = stream, total

    def filled(self) -> None:
        """Everything that a launch reads is on its way: who runs on another stream waits for it."""
        self.ready.record(self.stream)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], extra: Sequence[Any], out: Tensor, lse: Tensor | None, fused: bool) -> None:
        """Launch for ``q [tokens, Hq, D]`` into contiguous ``out`` and ``lse``, which is to base 2 where a graph may hold the launch.

        Args:
            extra: the module's own arguments.
            fused: let the kernels begin before the one in front of them has ended.
        """
        base = {} if lse is None else {"lse": lse, "return_lse": True}
        if lse is not None and self.module.kind != "ranges":
            base["lse_base"] = "log2"  # the wrapper for spans takes no base and returns this one
        with cuda.device(self.device):
            self.wrapper.run(q, caches, *extra, out=out, enable_pdl=None if fused else False, **base)

    def run_elsewhere(self, stream: Any, scratch: Tensor, launch: Callable[[], None]) -> None:
        """Launch on another stream than the plan's, over scratch of its own."""
        if not cuda.is_current_stream_capturing():
            stream.wait_event(self.ready)
        mine = self.wrapper._float_workspace_buffer
        self._own("_float_workspace_buffer", scratch)
        try:
            launch()
        finally:
            self._own("_float_workspace_buffer", mine)
        if not cuda.is_current_stream_capturing():
            self.used[stream.cuda_stream] = stream.record_event()

    def _own(self, name: str, value: Any) -> None:
        setattr(self.wrapper, name, value)

    def _behind_readers(self, stream: Any) -> None:
        """What still reads the tables must end before they change; work of one stream is in order anyway."""
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        for event in self.used.values():
            stream.wait_event(event)
        self.used = {}

    def _make_room(self, size: int) -> None:
        """Tables of at least this many bytes, and a pinned buffer whose last copy is done."""
        if self.wrapper._int_workspace_buffer.numel() < size:
            if self.graph is not None and self._pinned:
                raise RuntimeError(complaint("the plan's tables", f"{size} bytes", "no more than when it was made", "report this"))
            self._own("_int_workspace_buffer", torch.empty(size, dtype=torch.uint8, device=self.device))
            self._pinned = []
        free = next((i for i, (_, copied) in enumerate(self._pinned) if copied.query()), None)
        if free is None:
            held = self.wrapper._int_workspace_buffer.numel()
            self._pinned.append((pinned(held), cuda.Event()))
            free = len(self._pinned) - 1
        self._pinned.append(self._pinned.pop(free))
        self._own("_pin_memory_int_workspace_buffer", self._pinned[-1][0])


def pinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _wrapper(spec: AttentionSpec, module: Module, device: torch.device, graph: Captured | None) -> Any:
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    given: dict[str, Any] = {"kv_layout": spec.kv_layout, "use_cuda_graph": graph is not None}
    if graph is not None:
        given["qo_indptr_buf"] = torch.zeros(graph.seqs + 1, **ints)
        given["paged_kv_indptr_buf"] = torch.zeros(graph.seqs + 1, **ints)
        given["paged_kv_indices_buf"] = torch.zeros(graph.pages, **ints)
        given["paged_kv_last_page_len_buf"] = torch.zeros(graph.seqs, **ints)
    scratch = torch.empty(256, dtype=torch.uint8, device=device)
    with cuda.device(device):
        if module.kind == "ranges":
            types = {"q_data_type": module.dtype, "kv_data_type": module.kv_dtype, "o_data_type": module.dtype}
            sizes = {"head_dim_qk": module.head_size, "head_dim_vo": module.v_head_size}
            return flashinfer.BatchPrefillWithCausalBidirectionalRangesWrapper(scratch, **given, **types, **sizes)
        if module.kind == "variant":
            given |= {"jit_args": module.jit_args(), "jit_kwargs": module.jit_kwargs(), "variant_owns_mask": module.owns_mask}
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, backend=module.kernel, **given)


@dataclass(slots=True)
class Pool:
    """Lanes that no live plan holds. Plans may die in any thread."""

    _free: list[Lane] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, module: Module, graph: Captured | None) -> Lane | None:
        with self._lock:
            for i, lane in enumerate(self._free):
                if lane.module == module and lane.graph == graph:
                    lane.holder = None
                    return self._free.pop(i)
        return None

    def give(self, lanes: Sequence[Lane]) -> None:
        with self._lock:
            self._free = [*lanes, *self._free][:FREE_LANES]
